/* cuSOLVER: handles alone, which MXNet makes with each stream. */
#include "state.h"

#include <stdlib.h>

CREATES(cusolverDnCreate)
DESTROYS(cusolverDnDestroy)
SUCCEEDS(cusolverDnSetStream)
