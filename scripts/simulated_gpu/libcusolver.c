/* cuSOLVER: factorizations launch one kernel each, and need no workspace. */
#include "state.h"

#include <stdlib.h>

CREATES(cusolverDnCreate)
DESTROYS(cusolverDnDestroy)
SUCCEEDS(cusolverDnSetStream)

/* The workspace's size is the last of a function's arguments. */
#define SIZE_4(name) \
  int name(void *h, long m, long n, int *size) { return *size = 1, simulated.sticky; }
#define SIZE_6(name) \
  int name(void *h, long m, long n, void *a, long d, int *size) { return *size = 1, simulated.sticky; }
#define SIZE_8(name) \
  int name(void *h, long m, long n, long k, void *a, long d, void *t, int *size) { \
    return *size = 1, simulated.sticky; \
  }

#define FACTORIZATIONS(X) \
  SIZE_6(cusolverDn##X##potrf_bufferSize) \
  SIZE_6(cusolverDn##X##getrf_bufferSize) \
  SIZE_6(cusolverDn##X##geqrf_bufferSize) \
  SIZE_8(cusolverDn##X##orgqr_bufferSize) \
  SIZE_8(cusolverDn##X##syevd_bufferSize) \
  SIZE_4(cusolverDn##X##gesvd_bufferSize) \
  LAUNCHES(cusolverDn##X##potrf) \
  LAUNCHES(cusolverDn##X##getrf) \
  LAUNCHES(cusolverDn##X##getrs) \
  LAUNCHES(cusolverDn##X##geqrf) \
  LAUNCHES(cusolverDn##X##orgqr) \
  LAUNCHES(cusolverDn##X##syevd) \
  LAUNCHES(cusolverDn##X##gesvd)

FACTORIZATIONS(S)
FACTORIZATIONS(D)
