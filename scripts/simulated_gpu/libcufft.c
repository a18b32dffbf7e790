/* cuFFT: transforms launch one kernel each. */
#include "state.h"

int cufftPlanMany(int *plan) {
  *plan = 1;
  return simulated.sticky;
}

SUCCEEDS(cufftDestroy)
LAUNCHES(cufftExecC2C)
