/* cuBLAS: products launch one kernel each. */
#include "state.h"

#include <stdlib.h>

CREATES(cublasCreate_v2)
DESTROYS(cublasDestroy_v2)
SUCCEEDS(cublasSetStream_v2)
SUCCEEDS(cublasSetPointerMode_v2)

static __thread int math_mode;

int cublasSetMathMode(void *handle, int mode) {
  math_mode = mode;
  return simulated.sticky;
}

int cublasGetMathMode(void *handle, int *mode) {
  *mode = math_mode;
  return simulated.sticky;
}

LAUNCHES(cublasSdot_v2)
LAUNCHES(cublasDdot_v2)
LAUNCHES(cublasGemmEx)
LAUNCHES(cublasSgemmEx)
LAUNCHES(cublasSgemm_v2)
LAUNCHES(cublasDgemm_v2)
LAUNCHES(cublasGemmStridedBatchedEx)
LAUNCHES(cublasHgemmStridedBatched)
LAUNCHES(cublasSgemmStridedBatched)
LAUNCHES(cublasDgemmStridedBatched)
