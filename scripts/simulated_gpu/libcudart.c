/* The CUDA runtime: device memory is host memory, copies are made at once, kernels do nothing. */
#include "state.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define ALIGNMENT 512
#define MAGIC 0x53494d47u
#define CHECK_STICKY() \
  if (simulated.sticky) return simulated.sticky

/* ---------------------------------------------------------------------- devices */

int cudaDriverGetVersion(int *version) {
  *version = simulated.driver;
  return SUCCESS;
}

int cudaGetDeviceCount(int *count) {
  *count = 0;
  /* The runtime of CUDA 11 runs on every driver for CUDA 11. */
  if (simulated.driver < 11000) return failed(INSUFFICIENT_DRIVER);
  *count = simulated.devices;
  return simulated.devices ? SUCCESS : failed(100);
}

int cudaGetDevice(int *device) {
  *device = current_device;
  return simulated.sticky;
}

int cudaSetDevice(int device) {
  if (device < 0 || device >= simulated.devices) return failed(INVALID_DEVICE);
  current_device = device;
  return simulated.sticky;
}

int cudaDeviceGetAttribute(int *value, int attribute, int device) {
  if (device < 0 || device >= simulated.devices) return failed(INVALID_DEVICE);
  switch (attribute) {
    case 16: *value = 80; break;              /* multiprocessors */
    case 75: *value = simulated.major; break; /* compute capability */
    case 76: *value = simulated.minor; break;
    case 81: *value = 98304; break; /* shared memory of a multiprocessor */
    case 95: *value = 1; break;     /* cooperative launches */
    case 97: *value = 98304; break; /* shared memory of a block, on request */
    case 1: *value = 1024; break;   /* threads of a block */
    case 5: *value = 2147483647; break; /* blocks of a grid, by dimension */
    case 6: case 7: *value = 65535; break;
    case 8: *value = 49152; break; /* shared memory of a block */
    case 10: *value = 32; break;   /* threads of a warp */
    case 39: *value = 2048; break; /* threads of a multiprocessor */
    default: return refuse("an attribute that cudaDeviceGetAttribute is asked for");
  }
  return SUCCESS;
}

/* The beginning of cudaDeviceProp in CUDA 11, as far as MXNet reads it. */
struct properties {
  char name[256], uuid[16], luid[8];
  unsigned luid_mask;
  size_t memory, shared;
  int registers, warp;
  size_t pitch;
  int threads, block[3], grid[3], clock;
  size_t constants;
  int major, minor;
  size_t texture_alignment, texture_pitch;
  int overlap, multiprocessors;
};

int cudaGetDeviceProperties(struct properties *p, int device) {
  if (device < 0 || device >= simulated.devices) return failed(INVALID_DEVICE);
  memset(p, 0, sizeof *p);
  strcpy(p->name, "Simulated GPU");
  p->memory = simulated.device[device].memory;
  p->shared = 49152, p->registers = 65536, p->warp = 32, p->pitch = 2147483647;
  p->threads = 1024, p->block[0] = p->block[1] = 1024, p->block[2] = 64;
  p->grid[0] = 2147483647, p->grid[1] = p->grid[2] = 65535;
  p->clock = 1380000, p->constants = 65536, p->major = simulated.major, p->minor = simulated.minor;
  p->texture_alignment = 512, p->texture_pitch = 32, p->overlap = 1, p->multiprocessors = 80;
  return SUCCESS;
}

int cudaDeviceCanAccessPeer(int *can, int device, int peer) {
  *can = device != peer;
  return simulated.sticky;
}

int cudaDeviceGetP2PAttribute(int *value, int attribute, int device, int peer) {
  *value = attribute == 1 || device != peer;
  return simulated.sticky;
}

SUCCEEDS(cudaDeviceEnablePeerAccess)

/* ---------------------------------------------------------------------- memory */

struct block {
  unsigned magic;
  int device; /* -1 for the host */
  size_t size;
};

static struct block *block_of(void *memory) { return (struct block *)((char *)memory - ALIGNMENT); }

static int allocate(void **memory, size_t size, int device) {
  void *block = NULL;
  CHECK_STICKY();
  *memory = NULL;
  if (device >= 0) {
    struct device *of = &simulated.device[device];
    if (__atomic_add_fetch(&of->used, size, __ATOMIC_RELAXED) > of->memory) {
      __atomic_sub_fetch(&of->used, size, __ATOMIC_RELAXED);
      return failed(OUT_OF_MEMORY);
    }
  }
  if (posix_memalign(&block, ALIGNMENT, size + 2 * ALIGNMENT)) return failed(OUT_OF_MEMORY);
  *(struct block *)block = (struct block){MAGIC, device, size};
  *memory = (char *)block + ALIGNMENT;
  /* Values that no kernel wrote are NaN where values count, and zero where kernels do nothing. */
  if (size < 1 << 26) memset(*memory, simulated.computes && device >= 0 ? 0xff : 0, size);
  return SUCCESS;
}

static int release(void *memory, int on_host) {
  if (!memory) return SUCCESS;
  struct block *block = block_of(memory);
  if (block->magic != MAGIC || (block->device < 0) != on_host) return refuse("a free of foreign memory");
  if (block->device >= 0)
    __atomic_sub_fetch(&simulated.device[block->device].used, block->size, __ATOMIC_RELAXED);
  block->magic = 0;
  free(block);
  return SUCCESS;
}

int cudaMalloc(void **memory, size_t size) { return allocate(memory, size, current_device); }

int cudaMallocPitch(void **memory, size_t *pitch, size_t width, size_t height) {
  *pitch = (width + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  return allocate(memory, *pitch * height, current_device);
}

int cudaHostAlloc(void **memory, size_t size) { return allocate(memory, size, -1); }
int cudaFree(void *memory) { return release(memory, 0); }
int cudaFreeHost(void *memory) { return release(memory, 1); }

int cudaMemGetInfo(size_t *available, size_t *total) {
  struct device *device = &simulated.device[current_device];
  *total = device->memory;
  *available = device->memory > device->used ? device->memory - device->used : 0;
  return simulated.sticky;
}

static int copied(size_t bytes) {
  __atomic_add_fetch(&simulated.counts.copies, 1, __ATOMIC_RELAXED);
  __atomic_add_fetch(&simulated.counts.bytes, bytes, __ATOMIC_RELAXED);
  return simulated.sticky;
}

static int waited(void) {
  __atomic_add_fetch(&simulated.counts.waits, 1, __ATOMIC_RELAXED);
  return simulated.sticky;
}

int cudaMemcpyAsync(void *to, const void *from, size_t bytes) {
  CHECK_STICKY();
  memmove(to, from, bytes);
  return copied(bytes);
}

int cudaMemcpy(void *to, const void *from, size_t bytes) {
  int error = cudaMemcpyAsync(to, from, bytes);
  return error ? error : waited();
}

int cudaMemcpyPeerAsync(void *to, int device, const void *from, int peer, size_t bytes) {
  return cudaMemcpyAsync(to, from, bytes);
}

int cudaMemcpy2DAsync(char *to, size_t to_pitch, const char *from, size_t from_pitch, size_t width, size_t height) {
  CHECK_STICKY();
  for (size_t row = 0; row < height; ++row) memmove(to + row * to_pitch, from + row * from_pitch, width);
  return copied(width * height);
}

int cudaMemsetAsync(void *memory, int value, size_t bytes) {
  CHECK_STICKY();
  memset(memory, value, bytes);
  return SUCCESS;
}

/* ---------------------------------------------------------------------- streams and events */

CREATES(cudaStreamCreate)
CREATES(cudaEventCreateWithFlags)
DESTROYS(cudaStreamDestroy)
DESTROYS(cudaEventDestroy)
SUCCEEDS(cudaEventRecord)
/* One stream waits for another on the GPU, not the host. */
SUCCEEDS(cudaStreamWaitEvent)
int cudaStreamSynchronize(void *stream) { return waited(); }
int cudaDeviceSynchronize(void) { return waited(); }

/* ---------------------------------------------------------------------- errors */

int cudaGetLastError(void) {
  int error = last_error;
  last_error = SUCCESS;
  return simulated.sticky ? simulated.sticky : error;
}

int cudaPeekAtLastError(void) { return simulated.sticky ? simulated.sticky : last_error; }
const char *cudaGetErrorString(int code) { return error_text(code); }
const char *cudaGetErrorName(int code) { return error_text(code); }

/* ---------------------------------------------------------------------- kernels */

struct kernel {
  const void *function;
  const char *name;
};

static struct kernel *kernels;
static size_t kernel_count, kernel_room;

/* The kernels that check whether arrays are finite, one a dtype, and which argument has the result. */
static struct check {
  const void *function;
  int result;
} checks[16];
static size_t check_count;

void **__cudaRegisterFatBinary(void *binary) {
  static void *handle;
  return &handle;
}

void __cudaRegisterFunction(void **handle, const char *function, char *name) {
  if (kernel_count == kernel_room) {
    kernel_room = kernel_room ? 2 * kernel_room : 1 << 16;
    kernels = realloc(kernels, kernel_room * sizeof *kernels);
    if (!kernels) abort();
  }
  kernels[kernel_count++] = (struct kernel){function, name};
  if (strstr(name, "AllFiniteGPUKernel") && check_count < sizeof checks / sizeof *checks)
    checks[check_count++] = (struct check){function, strstr(name, "Multi") ? 1 : 2};
}

void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaRegisterVar(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) {}
char __cudaInitModule(void **handle) { return 1; }

static const char *kernel_name(const void *function) {
  for (size_t i = 0; i < kernel_count; ++i)
    if (kernels[i].function == function) return kernels[i].name;
  return "an unknown kernel";
}

/* The size of a launch, which the compiler's code passes from one call to the next. */
struct size3 {
  unsigned x, y, z;
};
static __thread struct configuration {
  struct size3 grid, block;
  size_t shared;
  void *stream;
} pushed;

unsigned __cudaPushCallConfiguration(struct size3 grid, struct size3 block, size_t shared, void *stream) {
  pushed = (struct configuration){grid, block, shared, stream};
  return 0;
}

int __cudaPopCallConfiguration(struct size3 *grid, struct size3 *block, size_t *shared, void **stream) {
  *grid = pushed.grid, *block = pushed.block, *shared = pushed.shared, *stream = pushed.stream;
  return SUCCESS;
}

/* Where kernels do nothing, gradients are found finite, so that steps update, or as a test asks for. */
static void find_finite(const void *function, void **arguments) {
  for (size_t i = 0; i < check_count; ++i)
    if (checks[i].function == function) **(float **)arguments[checks[i].result] = simulated.finite;
}

int cudaLaunchKernel(const void *function, struct size3 grid, struct size3 block, void **arguments) {
  if (!grid.x || !grid.y || !grid.z || !block.x || block.x * block.y * block.z > 1024)
    return failed(9); /* cudaErrorInvalidConfiguration */
  if (simulated.computes) return launch(kernel_name(function));
  find_finite(function, arguments);
  return launch("");
}

/* The beginning of cudaFuncAttributes. */
struct function_attributes {
  size_t shared, constants, local;
  int most_threads, registers, ptx, binary;
};

int cudaFuncGetAttributes(struct function_attributes *attributes, const void *function) {
  int code = simulated.major * 10 + simulated.minor;
  *attributes = (struct function_attributes){0, 0, 0, 1024, 32, code, code};
  return simulated.sticky;
}

int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks) {
  *blocks = 2;
  return simulated.sticky;
}
