/* NVRTC: the real one is loaded instead where it is installed, as in .venv-gpu-sim. */
#include "state.h"

const char *nvrtcGetErrorString(int code) { return error_text(code); }
