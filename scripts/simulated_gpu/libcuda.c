/* The CUDA driver: MXNet calls it only to load and launch kernels that NVRTC has compiled. */
#include "state.h"

#include <stdlib.h>

/* NVRTC 11.8 writes PTX that older drivers can't load, though they run machine code for CUDA 11. */
#define PTX_DRIVER 11080

static int load(void **module) {
  return simulated.driver < PTX_DRIVER ? failed(UNSUPPORTED_PTX) : create(module);
}

SUCCEEDS(cuInit)

int cuDriverGetVersion(int *version) {
  *version = simulated.driver;
  return SUCCESS;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
  if (attribute != 75 && attribute != 76) return refuse("an attribute that cuDeviceGetAttribute is asked for");
  *value = attribute == 75 ? simulated.major : simulated.minor;
  return SUCCESS;
}

int cuDeviceGet(int *device, int ordinal) {
  *device = ordinal;
  return simulated.sticky;
}

CREATES(cuDevicePrimaryCtxRetain)
int cuModuleLoadData(void **module) { return load(module); }
int cuModuleLoadDataEx(void **module) { return load(module); }
CREATES(cuModuleGetFunction)
DESTROYS(cuModuleUnload)
int cuLaunchKernel(void) { return launch("a kernel compiled at run time"); }

int cuGetErrorString(int code, const char **text) {
  *text = error_text(code);
  return SUCCESS;
}
