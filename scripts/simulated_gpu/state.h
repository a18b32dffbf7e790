/* What the stand-ins share: devices, counts and faults of the simulated GPUs. */
#ifndef SIMULATED_GPU_STATE_H
#define SIMULATED_GPU_STATE_H

#include <stddef.h>

/* CUDA's error codes. Stand-ins of other libraries return them too: a status is zero or an error. */
enum {
  SUCCESS = 0,
  INVALID_VALUE = 1,
  OUT_OF_MEMORY = 2,
  INSUFFICIENT_DRIVER = 35,
  INVALID_DEVICE = 101,
  UNSUPPORTED_PTX = 222,
  NOT_SUPPORTED = 801,
};

/* The most GPUs that can be simulated. */
#define MOST_DEVICES 8

struct counts {
  long launches; /* of kernels, and calls of libraries that launch some */
  long waits;    /* for a stream or a device, and blocking copies */
  long copies;   /* between host and device, within a device and between devices */
  long bytes;    /* copied */
};

struct device {
  size_t memory, used; /* bytes */
};

struct state {
  int devices;
  int major, minor;   /* the compute capability of each GPU */
  int driver;         /* the CUDA version of the driver, such as 11080 */
  int computes;       /* operators compute values: a kernel that is launched is an error */
  int finite;         /* what overflow checks find where kernels do nothing */
  int sticky;         /* the error that every call returns, as after an illegal memory access */
  struct device device[MOST_DEVICES];
  struct counts counts;
};

extern struct state simulated;
extern __thread int current_device;
/* The error of this thread's last call that failed, and the name of what was refused. */
extern __thread int last_error;
extern __thread const char *refused;

/* Return `error` after noting it as the thread's last one. */
int failed(int error);

/* Refuse a call that can't be simulated. Returns an error, whose text names the call. */
int refuse(const char *name);

/* Count a launch that the stand-in computes itself. */
void count_launch(void);

/* Count a launch. Where operators compute values, refuse it: it would leave its outputs unwritten. */
int launch(const char *name);

/* Return the text of an error code of any of the libraries. */
const char *error_text(int code);

/* A call that succeeds and does nothing, one that launches kernels, and one that makes a handle. */
#define SUCCEEDS(name) int name(void) { return simulated.sticky; }
#define LAUNCHES(name) int name(void) { return launch(#name); }
#define CREATES(name) int name(void **handle) { return create(handle); }
#define DESTROYS(name) int name(void *handle) { free(handle); return SUCCESS; }

int create(void **handle);

#endif
