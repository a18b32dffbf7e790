/* The state of the simulated GPUs. Environment variables set it when the library is loaded:
 *
 *   SIMULATED_GPUS=2               how many, 0 to 8
 *   SIMULATED_GPU_CAPABILITY=7.0   compute capability, 5.0 to 8.9 as the wheel has code for
 *   SIMULATED_GPU_MEMORY=16384     MiB of each
 *   SIMULATED_GPU_DRIVER=11.8      the newest CUDA version that the driver knows: MXNet sees no GPU
 *                                  below 11.0, and fused kernels don't load below 11.8
 *
 * The functions below "for ctypes" count what a program does, and make calls fail.
 */
#include "state.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct state simulated = {.finite = 1};
__thread int current_device;
__thread int last_error;
__thread const char *refused;
static __thread int computed_besides;

static double number(const char *name, double otherwise, double least, double most) {
  const char *text = getenv(name);
  char *end;
  if (!text || !*text) return otherwise;
  double value = strtod(text, &end);
  if (!*end && value >= least && value <= most) return value;
  fprintf(stderr, "%s is %s, and may be a number from %g to %g\n", name, text, least, most);
  exit(2);
}

__attribute__((constructor)) static void read_environment(void) {
  double capability = number("SIMULATED_GPU_CAPABILITY", 7.0, 5.0, 8.9) + 1e-6;
  double driver = number("SIMULATED_GPU_DRIVER", 11.8, 9.0, 13.9) + 1e-6;
  double memory = number("SIMULATED_GPU_MEMORY", 16384, 1, 1 << 20);
  simulated.devices = (int)number("SIMULATED_GPUS", 2, 0, MOST_DEVICES);
  simulated.major = (int)capability;
  simulated.minor = (int)((capability - simulated.major) * 10);
  simulated.driver = (int)driver * 1000 + (int)((driver - (int)driver) * 10) * 10;
  for (int i = 0; i < simulated.devices; ++i)
    simulated.device[i].memory = (size_t)memory << 20;
}

int failed(int error) {
  last_error = error;
  return error;
}

int refuse(const char *name) {
  refused = name;
  fprintf(stderr, "simulated GPU: %s is not simulated\n", name);
  return failed(NOT_SUPPORTED);
}

void count_launch(void) { __atomic_add_fetch(&simulated.counts.launches, 1, __ATOMIC_RELAXED); }

int launch(const char *name) {
  if (simulated.sticky) return simulated.sticky;
  if (simulated.computes && !computed_besides) return refuse(name);
  count_launch();
  return SUCCESS;
}

int create(void **handle) {
  *handle = calloc(1, 4096);
  return *handle ? simulated.sticky : failed(OUT_OF_MEMORY);
}

const char *error_text(int code) {
  static __thread char text[1024];
  switch (code) {
    case SUCCESS: return "no error";
    case INVALID_VALUE: return "invalid argument";
    case OUT_OF_MEMORY: return "out of memory";
    case INSUFFICIENT_DRIVER: return "CUDA driver version is insufficient for CUDA runtime version";
    case INVALID_DEVICE: return "invalid device ordinal";
    case UNSUPPORTED_PTX: return "the provided PTX was compiled with an unsupported toolchain.";
    case NOT_SUPPORTED:
      snprintf(text, sizeof text, "%s is not simulated", refused ? refused : "this call");
      return text;
    default:
      snprintf(text, sizeof text, "error %d of the simulated GPU", code);
      return text;
  }
}

/* Refuse kernels from now on: operators compute without them. */
void simulated_gpu_compute(void) { simulated.computes = 1; }

/* Let this thread launch kernels whose values are computed besides, until it is called with 0. */
void simulated_gpu_compute_besides(int yes) { computed_besides = yes; }

/* ---------------------------------------------------------------------- for ctypes */

/* Copy the counts since the last reset: launches, waits, copies, bytes. */
void simulated_gpu_counts(long *out) { memcpy(out, &simulated.counts, sizeof simulated.counts); }

void simulated_gpu_reset_counts(void) { memset(&simulated.counts, 0, sizeof simulated.counts); }

/* Let overflow checks find, where kernels do nothing, that all numbers are finite (1), or not (0). */
void simulated_gpu_set_finite(int yes) { simulated.finite = yes; }

/* Let every later call fail with this error, as after an illegal memory access (700); 0 ends it. */
void simulated_gpu_fail(int error) { simulated.sticky = error; }

/* Set the memory of a GPU, in bytes; return the bytes in use. */
size_t simulated_gpu_set_memory(int device, size_t bytes) {
  simulated.device[device].memory = bytes;
  return simulated.device[device].used;
}
