/* NCCL among the simulated GPUs of one process: broadcasts and sums are computed when a group ends. */
#include "state.h"

#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define MOST_CALLS 4096

struct communicator {
  int rank, size;
};

enum operation { BROADCAST, REDUCE };

struct call {
  enum operation operation;
  const void *from;
  void *to;
  size_t count;
  int type, root, rank;
};

static __thread struct call calls[MOST_CALLS];
static __thread int call_count, depth;

/* Bytes of ncclInt8, Uint8, Int32, Uint32, Int64, Uint64, Float16, Float32, Float64. */
static const size_t BYTES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8};

int ncclCommInitAll(void **communicators, int size, const int *devices) {
  for (int i = 0; i < size; ++i) {
    struct communicator *made = malloc(sizeof *made);
    *made = (struct communicator){i, size};
    communicators[i] = made;
  }
  return simulated.sticky;
}

DESTROYS(ncclCommDestroy)

__attribute__((target("f16c"))) static uint16_t half_sum(uint16_t a, uint16_t b) {
  return _cvtss_sh(_cvtsh_ss(a) + _cvtsh_ss(b), _MM_FROUND_TO_NEAREST_INT);
}

static int add(void *to, const void *from, size_t count, int type) {
  for (size_t i = 0; i < count; ++i) switch (type) {
    case 2: ((int32_t *)to)[i] += ((const int32_t *)from)[i]; break;
    case 4: ((int64_t *)to)[i] += ((const int64_t *)from)[i]; break;
    case 6: ((uint16_t *)to)[i] = half_sum(((uint16_t *)to)[i], ((const uint16_t *)from)[i]); break;
    case 7: ((float *)to)[i] += ((const float *)from)[i]; break;
    case 8: ((double *)to)[i] += ((const double *)from)[i]; break;
    default: return refuse("a sum of this dtype by NCCL");
  }
  return SUCCESS;
}

/* Compute a collective call from the calls of its ranks, which are used up. */
static int run(int first) {
  struct call of = calls[first], *members[MOST_DEVICES] = {0};
  size_t bytes = of.count * BYTES[of.type];
  for (int i = first; i < call_count; ++i) {
    struct call *call = &calls[i];
    int same = call->operation == of.operation && call->count == of.count && call->root == of.root;
    if (same && !members[call->rank]) members[call->rank] = call;
  }
  struct call *root = members[of.root];
  if (!root) return refuse("a collective call of NCCL without its root");
  void *result = malloc(bytes);
  int error = SUCCESS;
  memcpy(result, root->from, bytes);
  for (int rank = 0; rank < MOST_DEVICES; ++rank) {
    struct call *call = members[rank];
    if (!call) continue;
    if (of.operation == BROADCAST)
      memcpy(call->to, result, bytes);
    else if (call != root && !error)
      error = add(result, call->from, of.count, of.type);
    call->count = 0;
  }
  if (of.operation == REDUCE) memcpy(root->to, result, bytes);
  free(result);
  count_launch();
  return error;
}

int ncclGroupStart(void) {
  ++depth;
  return simulated.sticky;
}

int ncclGroupEnd(void) {
  int error = SUCCESS;
  if (--depth) return SUCCESS;
  for (int i = 0; i < call_count && !error; ++i)
    if (calls[i].count) error = run(i);
  call_count = 0;
  return error;
}

static int enqueue(struct call call) {
  if (call_count == MOST_CALLS) return refuse("a group of so many calls of NCCL");
  calls[call_count++] = call;
  if (depth) return simulated.sticky;
  ++depth;
  return ncclGroupEnd();
}

int ncclReduce(const void *from, void *to, size_t count, int type, int operation, int root, struct communicator *c) {
  if (operation) return refuse("a reduction by NCCL other than a sum");
  return enqueue((struct call){REDUCE, from, to, count, type, root, c->rank});
}

int ncclBcast(void *memory, size_t count, int type, int root, struct communicator *c) {
  return enqueue((struct call){BROADCAST, memory, memory, count, type, root, c->rank});
}

const char *ncclGetErrorString(int code) { return error_text(code); }
