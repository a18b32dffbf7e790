/* NVRTC: programs compile to nothing, under the names that they were given. */
#include "state.h"

#include <stdlib.h>
#include <string.h>

static const char PTX[] = "// compiled for a simulated GPU\n";

CREATES(nvrtcCreateProgram)
SUCCEEDS(nvrtcAddNameExpression)
SUCCEEDS(nvrtcCompileProgram)

int nvrtcDestroyProgram(void **program) {
  free(*program);
  *program = NULL;
  return SUCCESS;
}

int nvrtcGetPTXSize(void *program, size_t *size) {
  *size = sizeof PTX;
  return SUCCESS;
}

int nvrtcGetPTX(void *program, char *ptx) {
  memcpy(ptx, PTX, sizeof PTX);
  return SUCCESS;
}

int nvrtcGetProgramLogSize(void *program, size_t *size) {
  *size = 1;
  return SUCCESS;
}

int nvrtcGetProgramLog(void *program, char *log) {
  *log = 0;
  return SUCCESS;
}

int nvrtcGetLoweredName(void *program, const char *name, const char **lowered) {
  *lowered = name;
  return SUCCESS;
}

const char *nvrtcGetErrorString(int code) { return error_text(code); }
