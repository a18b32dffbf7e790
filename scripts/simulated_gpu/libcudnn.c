/* cuDNN: descriptors hold the sizes that MXNet asks for, and layers launch one kernel each. */
#include "state.h"

#include <stdlib.h>
#include <string.h>

#define MOST_DIMENSIONS 8
#define WORKSPACE 1024

struct tensor {
  int type, dimensions, size[MOST_DIMENSIONS];
};

struct recurrent {
  long hidden, layers, directions, mode, projected;
};

/* The version that mxnet-cu112 1.9.1 was built with. */
size_t cudnnGetVersion(void) { return 8101; }
const char *cudnnGetErrorString(int code) { return error_text(code); }

CREATES(cudnnCreate)
DESTROYS(cudnnDestroy)
SUCCEEDS(cudnnSetStream)

/* ---------------------------------------------------------------------- descriptors */

CREATES(cudnnCreateActivationDescriptor)
CREATES(cudnnCreateConvolutionDescriptor)
CREATES(cudnnCreateDropoutDescriptor)
CREATES(cudnnCreateFilterDescriptor)
CREATES(cudnnCreatePoolingDescriptor)
CREATES(cudnnCreateRNNDataDescriptor)
CREATES(cudnnCreateRNNDescriptor)
CREATES(cudnnCreateTensorDescriptor)
DESTROYS(cudnnDestroyActivationDescriptor)
DESTROYS(cudnnDestroyConvolutionDescriptor)
DESTROYS(cudnnDestroyDropoutDescriptor)
DESTROYS(cudnnDestroyFilterDescriptor)
DESTROYS(cudnnDestroyPoolingDescriptor)
DESTROYS(cudnnDestroyRNNDataDescriptor)
DESTROYS(cudnnDestroyRNNDescriptor)
DESTROYS(cudnnDestroyTensorDescriptor)
SUCCEEDS(cudnnDeriveBNTensorDescriptor)
SUCCEEDS(cudnnSetActivationDescriptor)
SUCCEEDS(cudnnSetConvolution2dDescriptor)
SUCCEEDS(cudnnSetConvolutionGroupCount)
SUCCEEDS(cudnnSetConvolutionMathType)
SUCCEEDS(cudnnSetConvolutionNdDescriptor)
SUCCEEDS(cudnnSetFilter4dDescriptor)
SUCCEEDS(cudnnSetFilterNdDescriptor)
SUCCEEDS(cudnnSetPooling2dDescriptor)
SUCCEEDS(cudnnSetPoolingNdDescriptor)
SUCCEEDS(cudnnSetRNNDataDescriptor)
SUCCEEDS(cudnnSetRNNMatrixMathType)
SUCCEEDS(cudnnSetRNNPaddingMode)
SUCCEEDS(cudnnRNNSetClip)

int cudnnSetTensor4dDescriptor(struct tensor *tensor, int format, int type, int n, int c, int h, int w) {
  *tensor = (struct tensor){type, 4, {n, c, h, w}};
  return simulated.sticky;
}

int cudnnSetTensorNdDescriptor(struct tensor *tensor, int type, int dimensions, const int *size) {
  if (dimensions < 3 || dimensions > MOST_DIMENSIONS) return refuse("a tensor of so few or many dimensions");
  tensor->type = type;
  tensor->dimensions = dimensions;
  memcpy(tensor->size, size, dimensions * sizeof *size);
  return simulated.sticky;
}

/* ---------------------------------------------------------------------- convolutions */

/* cudnnConvolution*AlgoPerf_t */
struct performance {
  int algorithm, status;
  float time;
  size_t memory;
  int determinism, math, reserved[3];
};

static int find(int *count, struct performance *found) {
  *found = (struct performance){.algorithm = 1, .time = 1, .math = 1};
  *count = 1;
  return simulated.sticky;
}

#define CONVOLUTION(direction)                                                                       \
  int cudnnGetConvolution##direction##AlgorithmMaxCount(void *handle, int *count) {                  \
    return *count = 4, simulated.sticky;                                                             \
  }                                                                                                  \
  int cudnnGetConvolution##direction##Algorithm_v7(void *handle, void *a, void *b, void *c, void *d, \
                                                   int most, int *count, void *found) {              \
    return find(count, found);                                                                       \
  }                                                                                                  \
  int cudnnFindConvolution##direction##Algorithm(void *handle, void *a, void *b, void *c, void *d,   \
                                                 int most, int *count, void *found) {                \
    return find(count, found);                                                                       \
  }                                                                                                  \
  int cudnnGetConvolution##direction##WorkspaceSize(void *handle, void *a, void *b, void *c, void *d, \
                                                    int algorithm, size_t *size) {                   \
    return *size = WORKSPACE, simulated.sticky;                                                      \
  }

CONVOLUTION(Forward)
CONVOLUTION(BackwardData)
CONVOLUTION(BackwardFilter)
LAUNCHES(cudnnConvolutionForward)
LAUNCHES(cudnnConvolutionBackwardData)
LAUNCHES(cudnnConvolutionBackwardFilter)
LAUNCHES(cudnnConvolutionBackwardBias)

/* ---------------------------------------------------------------------- recurrent layers */

int cudnnSetRNNDescriptor_v6(void *handle, struct recurrent *rnn, int hidden, int layers, void *dropout, int input,
                             int bidirectional, int mode) {
  *rnn = (struct recurrent){hidden, layers, bidirectional ? 2 : 1, mode, hidden};
  return simulated.sticky;
}

int cudnnSetRNNProjectionLayers(void *handle, struct recurrent *rnn, int projected) {
  rnn->projected = projected ? projected : rnn->hidden;
  return simulated.sticky;
}

/* Each gate has a product with the input and one with the state, with a bias each. */
int cudnnGetRNNParamsSize(void *handle, struct recurrent *rnn, struct tensor *input, size_t *size, int type) {
  static const long GATES[] = {1, 1, 4, 3}; /* relu, tanh, LSTM, GRU */
  static const size_t BYTES[] = {4, 8, 2};  /* float, double, half */
  if (rnn->mode > 3 || type > 2) return refuse("a recurrent layer of this kind");
  size_t count = 0;
  for (long layer = 0; layer < rnn->layers; ++layer) {
    long inputs = layer ? rnn->directions * rnn->projected : input->size[1];
    long products = GATES[rnn->mode] * rnn->hidden * (inputs + rnn->projected + 2);
    count += rnn->directions * (products + (rnn->projected < rnn->hidden ? rnn->projected * rnn->hidden : 0));
  }
  *size = count * BYTES[type];
  return simulated.sticky;
}

int cudnnGetRNNWorkspaceSize(void *handle, void *rnn, int length, void *inputs, size_t *size) {
  return *size = WORKSPACE, simulated.sticky;
}

int cudnnGetRNNTrainingReserveSize(void *handle, void *rnn, int length, void *inputs, size_t *size) {
  return *size = WORKSPACE, simulated.sticky;
}

LAUNCHES(cudnnRNNForwardInferenceEx)
LAUNCHES(cudnnRNNForwardTrainingEx)
LAUNCHES(cudnnRNNBackwardDataEx)
LAUNCHES(cudnnRNNBackwardWeightsEx)

/* ---------------------------------------------------------------------- other layers */

int cudnnDropoutGetStatesSize(void *handle, size_t *size) { return *size = WORKSPACE, simulated.sticky; }

/* A bit for each value. */
int cudnnDropoutGetReserveSpaceSize(struct tensor *tensor, size_t *size) {
  *size = 1;
  for (int i = 0; i < tensor->dimensions; ++i) *size *= tensor->size[i];
  *size = (*size + 7) / 8;
  return simulated.sticky;
}

SUCCEEDS(cudnnRestoreDropoutDescriptor)
LAUNCHES(cudnnSetDropoutDescriptor)
LAUNCHES(cudnnDropoutForward)
LAUNCHES(cudnnDropoutBackward)
LAUNCHES(cudnnActivationForward)
LAUNCHES(cudnnActivationBackward)
LAUNCHES(cudnnAddTensor)
LAUNCHES(cudnnBatchNormalizationForwardInference)
LAUNCHES(cudnnBatchNormalizationForwardTraining)
LAUNCHES(cudnnBatchNormalizationBackward)
LAUNCHES(cudnnPoolingForward)
LAUNCHES(cudnnPoolingBackward)
LAUNCHES(cudnnSoftmaxForward)
LAUNCHES(cudnnSoftmaxBackward)
