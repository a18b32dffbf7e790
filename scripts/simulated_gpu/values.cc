// Values on simulated GPUs: operators on GPUs compute by MXNet's functions for CPUs.
//
// Device memory is host memory, so a function for CPUs works on the same pointers. This library
// stands in front of libmxnet.so, which it loads: MXNET_LIBRARY_PATH names it. It replaces the GPU
// functions of operators in MXNet's registry, and defines functions of libmxnet.so that launch
// kernels outside of operators; the dynamic linker finds these first.
//
// As on tensor cores, products of float16 sum in float32 and round once. A kernel that is launched
// all the same is an error (state.c).
#define MSHADOW_USE_CBLAS 0
#define MSHADOW_USE_CUDA 0
#define MSHADOW_USE_F16C 0
#define MSHADOW_USE_MKL 0
#define MXNET_USE_CUDA 0
#define MXNET_USE_MKLDNN 1  // decides the layout of NDArray
#include <mxnet/c_api.h>
#include <mxnet/ndarray.h>
#include <mxnet/op_attr_types.h>
#include <mxnet/random_generator.h>
#include <mxnet/resource.h>
#include <nnvm/op.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

extern "C" void count_launch(void);
extern "C" void simulated_gpu_compute(void);
extern "C" void simulated_gpu_compute_besides(int yes);

namespace mshadow {
const int cpu::kDevMask;
const int gpu::kDevMask;
}  // namespace mshadow

namespace nnvm {
// What MXNet keeps of a variable.
struct VariableParam {
  uint32_t version = 0;
};
}  // namespace nnvm

namespace mxnet {
namespace op {
void RegisterLegacyOpProp();
void FillZerosCsrImpl(mshadow::Stream<mshadow::gpu>* stream, const NDArray& array);

template <typename Device>
void CastStorageComputeImpl(const OpContext& context, const NDArray& from, const NDArray& to);
}  // namespace op

namespace common {
template <typename Device>
void CastStorageDispatch(const OpContext& context, const NDArray& from, const NDArray& to);
template <>
void CastStorageDispatch<mshadow::cpu>(const OpContext&, const NDArray&, const NDArray&);

template <typename Device>
void SparseRetainOpForwardRspWrapper(mshadow::Stream<Device>* stream, const NDArray& from, const TBlob& rows,
                                     OpReqType request, NDArray* to);
template <>
void SparseRetainOpForwardRspWrapper<mshadow::cpu>(mshadow::Stream<mshadow::cpu>*, const NDArray&, const TBlob&,
                                                   OpReqType, NDArray*);
}  // namespace common

namespace kvstore {
template <typename Device>
void UniqueImpl(NDArray* out, mshadow::Stream<Device>* stream, const NDArray& from);
template <>
void UniqueImpl<mshadow::cpu>(NDArray*, mshadow::Stream<mshadow::cpu>*, const NDArray&);
}  // namespace kvstore

namespace ndarray {
template <typename From, typename To>
void Copy(const TBlob& from, TBlob* to, Context from_context, Context to_context, RunContext context);
template <>
void Copy<mshadow::cpu, mshadow::cpu>(const TBlob&, TBlob*, Context, Context, RunContext);

template <typename Device>
void ElementwiseSum(const std::vector<TBlob> source, TBlob* out, RunContext context);
template <>
void ElementwiseSum<mshadow::cpu>(const std::vector<TBlob>, TBlob*, RunContext);

template <typename Device>
void ElementwiseSum(mshadow::Stream<Device>* stream, const Resource& resource, const std::vector<NDArray>& source,
                    NDArray* out);
template <>
void ElementwiseSum<mshadow::cpu>(mshadow::Stream<mshadow::cpu>*, const Resource&, const std::vector<NDArray>&, NDArray*);

template <typename Device>
void Eval(const float& value, TBlob* out, RunContext context);
template <>
void Eval<mshadow::cpu>(const float&, TBlob*, RunContext);

template <typename Device>
void Eval(mshadow::Stream<Device>* stream, const float value, const NDArray& out);
template <>
void Eval<mshadow::cpu>(mshadow::Stream<mshadow::cpu>*, const float, const NDArray&);
}  // namespace ndarray
}  // namespace mxnet

namespace {

using namespace mxnet;  // NOLINT
using mshadow::cpu;
using mshadow::gpu;
using mshadow::half::half_t;
using nnvm::NodeAttrs;
using nnvm::Op;
using Blobs = std::vector<TBlob>;
using Arrays = std::vector<NDArray>;
using Requests = std::vector<OpReqType>;

// Products whose CPU function takes no float16, or would round each of its sums to float16.
const std::unordered_set<std::string> kProducts = {
    "Convolution", "_backward_Convolution", "Deconvolution", "_backward_Deconvolution",
    "FullyConnected", "_backward_FullyConnected", "RNN", "_backward_RNN",
    "dot", "_backward_dot", "batch_dot", "_backward_batch_dot",
    "_np_dot", "_backward_np_dot", "_npi_matmul", "_backward_np_matmul",
    "_npi_einsum", "_backward_npi_einsum",
    "_npi_tensordot", "_backward_npi_tensordot",
    "_npi_tensordot_int_axes", "_backward_npi_tensordot_int_axes",
    "_contrib_interleaved_matmul_selfatt_qk", "_backward_interleaved_matmul_selfatt_qk",
    "_contrib_interleaved_matmul_selfatt_valatt", "_backward_interleaved_matmul_selfatt_valatt",
    "_contrib_interleaved_matmul_encdec_qk", "_backward_interleaved_matmul_encdec_qk",
    "_contrib_interleaved_matmul_encdec_valatt", "_backward_interleaved_matmul_encdec_valatt",
};

// Operators that run other operators, the user's code or copies, and so need no other function.
const std::unordered_set<std::string> kRunners = {
    "_copyto",
    "_CachedOp", "_backward_CachedOp", "_foreach", "_backward_foreach", "_while_loop",
    "_backward_while_loop", "_cond", "_backward_cond", "Custom", "_backward_Custom",
    "_CustomFunction", "_backward_CustomFunction",
};

TBlob on_cpu(const TBlob& blob) {
  return TBlob(blob.dptr_, blob.shape_, cpu::kDevMask, blob.type_flag_, 0);
}

Blobs on_cpu(const Blobs& blobs) {
  Blobs made;
  for (const TBlob& blob : blobs) made.push_back(on_cpu(blob));
  return made;
}

RunContext on_cpu(const RunContext& context) {
  RunContext made = context;
  made.ctx = Context::CPU();
  made.stream = nullptr;
  return made;
}

// A simulated generator of cuRAND's, and the CPU's generator that draws in its place.
struct Generator {
  unsigned long long seed;
  mshadow::Random<cpu>* draws;
};

// Return the context of a call with a CPU's generator of random numbers. The GPU's temporary memory
// serves as it is, and so do its parallel generators, which are made below.
OpContext on_cpu(const OpContext& context) {
  OpContext made = context;
  made.run_ctx = on_cpu(context.run_ctx);
  for (Resource& resource : made.requested) {
    if (resource.req.type != ResourceRequest::kRandom) continue;
    // mshadow::Random<gpu> begins with the generator.
    Generator* generator = *static_cast<Generator**>(resource.ptr_);
    if (!generator->draws) generator->draws = new mshadow::Random<cpu>(generator->seed);
    resource.ptr_ = generator->draws;
  }
  return made;
}

bool any_half(const Blobs& blobs) {
  for (const TBlob& blob : blobs)
    if (blob.type_flag_ == mshadow::kFloat16) return true;
  return false;
}

// Float32 copies of the float16 tensors among `blobs`.
class Widened {
 public:
  explicit Widened(const Blobs& originals) : originals_(originals) {
    for (const TBlob& blob : originals_) {
      storage_.emplace_back();
      if (blob.type_flag_ != mshadow::kFloat16) {
        blobs.push_back(blob);
        continue;
      }
      const half_t* values = static_cast<const half_t*>(blob.dptr_);
      storage_.back().assign(values, values + blob.Size());
      storage_.back().push_back(0);  // an empty tensor has an address too
      blobs.emplace_back(storage_.back().data(), blob.shape_, cpu::kDevMask, mshadow::kFloat32, 0);
    }
  }

  void round(const Requests& requests) const {
    for (size_t i = 0; i < originals_.size(); ++i) {
      if (originals_[i].type_flag_ != mshadow::kFloat16 || requests[i] == kNullOp) continue;
      half_t* values = static_cast<half_t*>(originals_[i].dptr_);
      for (size_t k = 0; k < originals_[i].Size(); ++k) values[k] = half_t(storage_[i][k]);
    }
  }

  Blobs blobs;

 private:
  Blobs originals_;
  std::vector<std::vector<float>> storage_;
};

// Call `compute` on the CPU, for a product in float32.
template <typename Compute>
void compute(bool product, const OpContext& context, const Blobs& inputs, const Requests& requests,
             const Blobs& outputs, const Compute& function) {
  const Blobs reads = on_cpu(inputs), writes = on_cpu(outputs);
  count_launch();
  if (!product || !(any_half(reads) || any_half(writes))) {
    function(on_cpu(context), reads, requests, writes);
    return;
  }
  const Widened wide_reads(reads), wide_writes(writes);
  function(on_cpu(context), wide_reads.blobs, requests, wide_writes.blobs);
  wide_writes.round(requests);
}

// ---------------------------------------------------------------------- sparse arrays

// Arrays on a GPU as arrays on the CPU. An output that is an input too is the same array.
class ArraysOnCpu {
 public:
  ArraysOnCpu(const Arrays& inputs, const Arrays& outputs) : outputs_(outputs) {
    for (const NDArray& array : inputs) reads.push_back(view(array));
    for (const NDArray& array : outputs) {
      size_t same = 0;
      while (same < inputs.size() && inputs[same].var() != array.var()) ++same;
      const bool sized = mxnet::shape_is_known(array.shape());
      owned_.push_back(same == inputs.size() && (array.storage_type() != kDefaultStorage || !sized));
      writes.push_back(same < inputs.size() ? reads[same] : owned_.back() ? empty(array) : view(array));
    }
  }

  // Copy the outputs that are sparse, or whose shape depends on values: their memory is allocated now.
  void store() {
    for (size_t i = 0; i < writes.size(); ++i) {
      if (!owned_[i]) continue;
      NDArray& target = const_cast<NDArray&>(outputs_[i]);
      if (target.storage_type() == kDefaultStorage) {
        target.Init(writes[i].shape());
        copy(target.data(), writes[i].data());
        continue;
      }
      const bool row_sparse = target.storage_type() == kRowSparseStorage;
      if (!writes[i].storage_initialized()) {
        if (row_sparse)
          target.set_aux_shape(rowsparse::kIdx, mxnet::TShape(mshadow::Shape1(0)));
        else
          op::FillZerosCsrImpl(static_cast<mshadow::Stream<gpu>*>(nullptr), target);
        continue;
      }
      mxnet::ShapeVector shapes;
      for (size_t k = 0; k < (row_sparse ? 1 : 2); ++k) shapes.push_back(writes[i].aux_shape(k));
      target.CheckAndAlloc(shapes);
      copy(target.data(), writes[i].data());
      for (size_t k = 0; k < shapes.size(); ++k) copy(target.aux_data(k), writes[i].aux_data(k));
    }
  }

  Arrays reads, writes;

 private:
  static void copy(const TBlob& to, const TBlob& from) {
    CHECK_EQ(to.type_flag_, from.type_flag_);
    std::memcpy(to.dptr_, from.dptr_, from.Size() * mshadow::mshadow_sizeof(from.type_flag_));
  }

  static NDArray empty(const NDArray& array) {
    if (!mxnet::shape_is_known(array.shape())) return NDArray(Context::CPU(), array.dtype());
    return NDArray(array.storage_type(), array.shape(), Context::CPU(), true, array.dtype());
  }

  static NDArray view(const NDArray& array) {
    if (array.storage_type() == kDefaultStorage) return NDArray(on_cpu(array.data()), 0);
    if (!array.storage_initialized()) return empty(array);
    Blobs indices;
    for (size_t k = 0; k < (array.storage_type() == kRowSparseStorage ? 1 : 2); ++k)
      indices.push_back(on_cpu(array.aux_data(k)));
    return NDArray(array.storage_type(), array.shape(), on_cpu(array.data()), indices, 0);
  }

  const Arrays& outputs_;
  std::vector<bool> owned_;
};

// ---------------------------------------------------------------------- the registry

// A std::function as the compiler of the wheel laid it out. It passes arguments by value where newer
// compilers pass a reference, so functions with such arguments are called and made by hand.
template <typename Signature>
struct Legacy;

template <typename Result, typename... Arguments>
struct Legacy<Result(Arguments...)> {
  using Function = std::function<Result(Arguments...)>;

  const void* closure[2];
  bool (*manage)(Legacy& to, const Legacy& from, int operation);
  Result (*invoke)(const Legacy& self, Arguments... arguments);

  static Result call(const Function& function, Arguments... arguments) {
    const Legacy& self = reinterpret_cast<const Legacy&>(function);
    return self.invoke(self, arguments...);
  }

  // Let `target` call `function`, which lives as long as the process.
  static void assign(const Function& target, const Function& function) {
    Legacy& self = reinterpret_cast<Legacy&>(const_cast<Function&>(target));
    self.closure[0] = new Function(function);
    self.manage = [](Legacy& to, const Legacy& from, int operation) {
      const int kClone = 2;
      if (operation == kClone) to.closure[0] = from.closure[0];
      return false;
    };
    self.invoke = [](const Legacy& self, Arguments... arguments) {
      return (*static_cast<const Function*>(self.closure[0]))(arguments...);
    };
  }
};

template <typename Function>
struct LegacyOf;

template <typename Signature>
struct LegacyOf<std::function<Signature>> : Legacy<Signature> {};

// Return all operators, each once.
std::vector<const Op*> operators() {
  std::vector<const Op*> found;
  for (const std::string& name : dmlc::Registry<Op>::ListAllNames()) {
    const Op* op = dmlc::Registry<Op>::Find(name);
    if (op->name == name) found.push_back(op);
  }
  return found;
}

// Replace each operator's attribute for GPUs by `make(operator, its attribute for CPUs)`.
template <typename Function, typename Make>
void replace(const std::string& attribute, const Make& make) {
  const auto& on_cpus = Op::GetAttr<Function>(attribute + "<cpu>");
  const auto& on_gpus = Op::GetAttr<Function>(attribute + "<gpu>");
  for (const Op* op : operators())
    if (on_gpus.contains(op) && on_cpus.contains(op) && !kRunners.count(op->name))
      const_cast<Function&>(on_gpus[op]) = make(op, on_cpus[op]);
}

void replace_computing() {
  replace<FCompute>("FCompute", [](const Op* op, FCompute function) -> FCompute {
    const bool product = kProducts.count(op->name);
    return [=](const NodeAttrs& attrs, const OpContext& context, const Blobs& inputs,
               const Requests& requests, const Blobs& outputs) {
      compute(product, context, inputs, requests, outputs,
              [&](const OpContext& c, const Blobs& i, const Requests& r, const Blobs& o) {
                function(attrs, c, i, r, o);
              });
    };
  });
  replace<FStatefulCompute>("FStatefulCompute", [](const Op* op, FStatefulCompute function) -> FStatefulCompute {
    const bool product = kProducts.count(op->name), recurrent = op->name == "_backward_RNN";
    return [=](const OpStatePtr& state, const OpContext& context, const Blobs& inputs,
               const Requests& asked, const Blobs& given) {
      Requests requests = asked;
      Blobs outputs = given;
      std::vector<double> unread;
      if (recurrent && requests[0] == kNullOp) {
        // Without the gradient of the data, MXNet's function stops it between the layers.
        unread.resize(inputs[0].Size());
        outputs[0] = TBlob(unread.data(), inputs[0].shape_, gpu::kDevMask, inputs[0].type_flag_, 0);
        requests[0] = kWriteTo;
      }
      compute(product, context, inputs, requests, outputs,
              [&](const OpContext& c, const Blobs& i, const Requests& r, const Blobs& o) {
                function(state, c, i, r, o);
              });
    };
  });
  replace<FComputeEx>("FComputeEx", [](const Op* op, FComputeEx function) -> FComputeEx {
    return [=](const NodeAttrs& attrs, const OpContext& context, const Arrays& inputs,
               const Requests& requests, const Arrays& outputs) {
      ArraysOnCpu arrays(inputs, outputs);
      count_launch();
      function(attrs, on_cpu(context), arrays.reads, requests, arrays.writes);
      arrays.store();
    };
  });
}

// oneDNN's recurrent layers have a state of their own, which no function on tensors takes.
struct WithoutOneDnn {
  WithoutOneDnn() : set(std::getenv(kSwitch) != nullptr), before(set ? std::getenv(kSwitch) : "") {
    setenv(kSwitch, "0", 1);
  }
  ~WithoutOneDnn() { set ? setenv(kSwitch, before.c_str(), 1) : unsetenv(kSwitch); }

  static constexpr const char* kSwitch = "MXNET_USE_MKLDNN_RNN";
  const bool set;
  const std::string before;
};

// Make the states of operators for CPUs; those of products for float32.
void replace_states() {
  const auto& stateful = Op::GetAttr<FStatefulCompute>("FStatefulCompute<cpu>");
  const auto& states = Op::GetAttr<FCreateOpState>("FCreateOpState");
  for (const Op* op : operators()) {
    if (!states.contains(op) || !stateful.contains(op) || kRunners.count(op->name)) continue;
    using Calls = LegacyOf<FCreateOpState>;
    const FCreateOpState create = states[op];
    const bool product = kProducts.count(op->name);
    Calls::assign(states[op], [=](const NodeAttrs& attrs, Context context, const mxnet::ShapeVector& shapes,
                                  const std::vector<int>& types) {
      if (context.dev_mask() != gpu::kDevMask) return Calls::call(create, attrs, context, shapes, types);
      std::vector<int> wide = types;
      for (int& type : wide)
        if (product && type == mshadow::kFloat16) type = mshadow::kFloat32;
      const WithoutOneDnn plain;
      return Calls::call(create, attrs, Context::CPU(), shapes, wide);
    });
  }
}

// Request the resources that an operator's function for CPUs uses.
void replace_requests() {
  const auto& requests = Op::GetAttr<FResourceRequestEx>("FResourceRequestEx");
  for (const Op* op : operators()) {
    if (!requests.contains(op)) continue;
    using Calls = LegacyOf<FResourceRequestEx>;
    const FResourceRequestEx request = requests[op];
    Calls::assign(requests[op], [=](const NodeAttrs& attrs, int device, DispatchMode mode) {
      return Calls::call(request, attrs, device == gpu::kDevMask ? cpu::kDevMask : device, mode);
    });
  }
}

// ---------------------------------------------------------------------- fused operators

// The beginning of nnvm::Node in the wheel, whose compiler has smaller hash maps than newer ones.
struct LegacyNode {
  struct Attributes {
    const Op* op;
    std::string name;
    char dictionary[48];
    dmlc::any parsed;
    std::vector<std::shared_ptr<nnvm::Symbol>> subgraphs;
  } attributes;
  std::vector<nnvm::NodeEntry> inputs;
  std::vector<nnvm::ObjectPtr> control_dependencies;
};

LegacyNode* legacy(const nnvm::ObjectPtr& node) { return reinterpret_cast<LegacyNode*>(node.get()); }

using Nodes = std::vector<LegacyNode*>;

// Append a node behind those that it depends on, in MXNet's order.
void append(LegacyNode* node, std::unordered_set<LegacyNode*>* seen, Nodes* nodes) {
  if (!seen->insert(node).second) return;
  for (const nnvm::NodeEntry& input : node->inputs) append(legacy(input.node), seen, nodes);
  for (const nnvm::ObjectPtr& first : node->control_dependencies) append(legacy(first), seen, nodes);
  nodes->push_back(node);
}

void check(int status) { CHECK_EQ(status, 0) << MXGetLastError(); }

// Return tensors without memory: the outputs of all nodes of a graph, in order, for these inputs.
Blobs infer(nnvm::Symbol* graph, const Blobs& inputs) {
  SymbolHandle all;
  std::vector<int> types, ends = {0}, sizes;
  for (const TBlob& blob : inputs) {
    types.push_back(blob.type_flag_);
    sizes.insert(sizes.end(), blob.shape_.begin(), blob.shape_.end());
    ends.push_back(sizes.size());
  }
  check(MXSymbolGetInternals(graph, &all));
  uint32_t counts[3];
  const int *dimensions[3], **shapes[3], *found[3];
  int complete;
  check(MXSymbolInferShapePartialEx(all, inputs.size(), nullptr, reinterpret_cast<uint32_t*>(ends.data()),
                                    sizes.data(), counts, dimensions, shapes, counts + 1, dimensions + 1, shapes + 1,
                                    counts + 2, dimensions + 2, shapes + 2, &complete));
  int zero_is_a_size;
  check(MXIsNumpyShape(&zero_is_a_size));
  Blobs made;
  for (uint32_t i = 0; i < counts[1]; ++i) {
    mxnet::TShape shape(dimensions[1][i], 0);
    for (int k = 0; k < dimensions[1][i]; ++k)
      shape[k] = shapes[1][i][k] || zero_is_a_size ? shapes[1][i][k] : -1;
    made.emplace_back(nullptr, shape, gpu::kDevMask, 0, 0);
  }
  check(MXSymbolInferType(all, inputs.size(), nullptr, types.data(), counts, found, counts + 1, found + 1,
                          counts + 2, found + 2, &complete));
  for (uint32_t i = 0; i < made.size(); ++i) made[i].type_flag_ = found[1][i];
  check(MXSymbolFree(all));
  return made;
}

// Infer the shapes of a node's inputs from those of its outputs, as of a state that a recurrent layer
// begins with.
void infer_inputs(const LegacyNode* node, const std::vector<size_t>& reads, size_t place, Blobs* values) {
  using Calls = LegacyOf<mxnet::FInferShape>;
  const auto& rules = Op::GetAttr<mxnet::FInferShape>("FInferShape");
  if (!node->attributes.op || !rules.contains(node->attributes.op)) return;
  mxnet::ShapeVector inputs, outputs = {(*values)[place].shape_};
  for (size_t read : reads) inputs.push_back((*values)[read].shape_);
  Calls::call(rules[node->attributes.op], reinterpret_cast<const NodeAttrs&>(node->attributes), &inputs, &outputs);
  for (size_t i = 0; i < reads.size(); ++i) (*values)[reads[i]].shape_ = inputs[i];
}

// Compute an operator that MXNet's pointwise fusion has made, operator by operator. The compiled
// kernel would round float16 only where it writes an output. MXNet writes and compiles it, `launch`.
void compute_fused(const FCompute& launch, const NodeAttrs& attrs, const OpContext& context, const Blobs& inputs,
                   const Requests& requests, const Blobs& outputs) {
  struct Besides {
    Besides() { simulated_gpu_compute_besides(1); }
    ~Besides() { simulated_gpu_compute_besides(0); }
  };
  {
    Besides besides;
    launch(attrs, context, inputs, requests, outputs);
  }
  nnvm::Symbol* graph = reinterpret_cast<const LegacyNode::Attributes&>(attrs).subgraphs[0].get();
  const auto& functions = Op::GetAttr<FCompute>("FCompute<gpu>");
  Nodes nodes;
  std::unordered_set<LegacyNode*> seen;
  for (const nnvm::NodeEntry& head : graph->outputs) append(legacy(head.node), &seen, &nodes);
  for (LegacyNode* node : nodes)
    // Fusion makes variables without it, which MXNet's C API reads.
    if (!node->attributes.op && node->attributes.parsed.empty()) node->attributes.parsed = nnvm::VariableParam();
  Blobs values = infer(graph, inputs);
  std::unordered_map<LegacyNode*, size_t> places, counts;
  size_t place = 0, input = 0;
  for (LegacyNode* node : nodes) {
    const Op* op = node->attributes.op;
    const NodeAttrs& attributes = reinterpret_cast<const NodeAttrs&>(node->attributes);
    places[node] = place;
    counts[node] = !op ? 1 : op->get_num_outputs ? op->get_num_outputs(attributes) : op->num_outputs;
    place += counts[node];
  }
  CHECK_EQ(place, values.size()) << "a fused operator with hidden outputs is not simulated";
  const auto place_of = [&](const nnvm::NodeEntry& entry) { return places[legacy(entry.node)] + entry.index; };
  for (size_t i = 0; i < outputs.size(); ++i) values[place_of(graph->outputs[i])].shape_ = outputs[i].shape_;
  for (size_t n = nodes.size(); n--;) {
    std::vector<size_t> reads;
    bool known = true;
    for (const nnvm::NodeEntry& entry : nodes[n]->inputs) {
      reads.push_back(place_of(entry));
      known &= mxnet::shape_is_known(values[reads.back()].shape_);
    }
    if (!known) infer_inputs(nodes[n], reads, places[nodes[n]], &values);
  }
  std::vector<std::unique_ptr<char[]>> storage;
  for (LegacyNode* node : nodes) {
    const Op* op = node->attributes.op;
    if (!op) {
      values[places[node]] = inputs[input++];
      continue;
    }
    Blobs reads, writes;
    for (const nnvm::NodeEntry& entry : node->inputs) reads.push_back(values[place_of(entry)]);
    const NodeAttrs& attributes = reinterpret_cast<const NodeAttrs&>(node->attributes);
    const size_t count = counts[node];
    for (size_t k = 0; k < count; ++k) {
      TBlob& value = values[places[node] + k];
      storage.emplace_back(new char[value.Size() * mshadow::mshadow_sizeof(value.type_flag_) + 8]);
      value.dptr_ = storage.back().get();
      writes.push_back(value);
    }
    if (!count) continue;  // a helper of shape inference
    CHECK(functions.contains(op)) << op->name << " in a fused operator is not simulated";
    functions[op](attributes, context, reads, Requests(count, kWriteTo), writes);
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    const TBlob& made = values[place_of(graph->outputs[i])];
    CHECK_EQ(made.Size(), outputs[i].Size());
    CHECK_EQ(made.type_flag_, outputs[i].type_flag_);
    if (requests[i] == kAddTo)
      functions[Op::Get("_grad_add")](attrs, context, {outputs[i], made}, {kWriteInplace}, {outputs[i]});
    else if (requests[i] != kNullOp)
      std::memcpy(outputs[i].dptr_, made.dptr_, made.Size() * mshadow::mshadow_sizeof(made.type_flag_));
  }
}

bool replace_functions() {
  simulated_gpu_compute();
  // MXNet registers these when its first caller lists the operators.
  op::RegisterLegacyOpProp();
  replace_computing();
  replace_states();
  replace_requests();
  FCompute& fused = const_cast<FCompute&>(Op::GetAttr<FCompute>("FCompute<gpu>")[Op::Get("_FusedOp")]);
  using std::placeholders::_1, std::placeholders::_2, std::placeholders::_3, std::placeholders::_4;
  fused = std::bind(compute_fused, fused, _1, _2, _3, _4, std::placeholders::_5);
  return true;
}

// When this library is loaded, libmxnet.so has registered its operators.
const bool replaced = replace_functions();

}  // namespace

// ---------------------------------------------------------------------- outside of operators

namespace mxnet {
namespace ndarray {

// Copies between devices; within one device a copy may cast.
template <>
void Copy<gpu, gpu>(const TBlob& from, TBlob* to, Context from_context, Context to_context, RunContext context) {
  count_launch();
  if (from_context.dev_id != to_context.dev_id)
    CHECK_EQ(to->type_flag_, from.type_flag_) << "copies between GPUs can't cast";
  TBlob target = on_cpu(*to);
  Copy<cpu, cpu>(on_cpu(from), &target, Context::CPU(), Context::CPU(), on_cpu(context));
}

template <>
void ElementwiseSum<gpu>(const std::vector<TBlob> source, TBlob* out, RunContext context) {
  count_launch();
  TBlob target = on_cpu(*out);
  ElementwiseSum<cpu>(on_cpu(source), &target, on_cpu(context));
}

template <>
void ElementwiseSum<gpu>(mshadow::Stream<gpu>* stream, const Resource& resource, const std::vector<NDArray>& source,
                         NDArray* out) {
  count_launch();
  const Arrays outputs = {*out};
  ArraysOnCpu arrays(source, outputs);
  ElementwiseSum<cpu>(static_cast<mshadow::Stream<cpu>*>(nullptr), resource, arrays.reads, &arrays.writes[0]);
  arrays.store();
}

template <>
void Eval<gpu>(const float& value, TBlob* out, RunContext context) {
  count_launch();
  TBlob target = on_cpu(*out);
  Eval<cpu>(value, &target, on_cpu(context));
}

template <>
void Eval<gpu>(mshadow::Stream<gpu>* stream, const float value, const NDArray& out) {
  count_launch();
  const Arrays outputs = {out};
  ArraysOnCpu arrays({}, outputs);
  Eval<cpu>(static_cast<mshadow::Stream<cpu>*>(nullptr), value, arrays.writes[0]);
  arrays.store();
}

}  // namespace ndarray

namespace common {

template <>
void CastStorageDispatch<gpu>(const OpContext& context, const NDArray& from, const NDArray& to) {
  count_launch();
  const Arrays inputs = {from}, outputs = {to};
  ArraysOnCpu arrays(inputs, outputs);
  CastStorageDispatch<cpu>(on_cpu(context), arrays.reads[0], arrays.writes[0]);
  arrays.store();
}

template <>
void SparseRetainOpForwardRspWrapper<gpu>(mshadow::Stream<gpu>* stream, const NDArray& from, const TBlob& rows,
                                          OpReqType request, NDArray* to) {
  count_launch();
  const Arrays inputs = {from}, outputs = {*to};
  ArraysOnCpu arrays(inputs, outputs);
  SparseRetainOpForwardRspWrapper<cpu>(nullptr, arrays.reads[0], on_cpu(rows), request, &arrays.writes[0]);
  arrays.store();
}

}  // namespace common

namespace op {

template <>
void CastStorageComputeImpl<gpu>(const OpContext& context, const NDArray& from, const NDArray& to) {
  common::CastStorageDispatch<gpu>(context, from, to);
}

// Empty a csr array: no values, and rows that begin and end at 0.
void FillZerosCsrImpl(mshadow::Stream<gpu>* stream, const NDArray& array) {
  count_launch();
  array.set_aux_shape(csr::kIdx, mxnet::TShape(mshadow::Shape1(0)));
  array.CheckAndAllocAuxData(csr::kIndPtr, mxnet::TShape(mshadow::Shape1(array.shape()[0] + 1)));
  const TBlob ends = array.aux_data(csr::kIndPtr);
  std::memset(ends.dptr_, 0, ends.Size() * mshadow::mshadow_sizeof(ends.type_flag_));
}

}  // namespace op

namespace kvstore {

// The rows to pull are indices, sorted in place: the first of them are the unique ones.
template <>
void UniqueImpl<gpu>(NDArray* out, mshadow::Stream<gpu>* stream, const NDArray& from) {
  count_launch();
  const Arrays inputs = {from}, outputs = {*out};
  ArraysOnCpu arrays(inputs, outputs);
  UniqueImpl<cpu>(&arrays.writes[0], nullptr, arrays.reads[0]);
  arrays.store();
}

}  // namespace kvstore

namespace common {
namespace random {

// The parallel generators of a GPU hold the states of a CPU's: both are a pointer to their states.
template <>
class RandGenerator<gpu, float> {
 public:
  static void AllocState(RandGenerator* made);
  static void FreeState(RandGenerator* made);
  void Seed(mshadow::Stream<gpu>* stream, uint32_t seed);
};

using OfCpu = RandGenerator<cpu, float>;

void RandGenerator<gpu, float>::AllocState(RandGenerator* made) { OfCpu::AllocState(reinterpret_cast<OfCpu*>(made)); }

void RandGenerator<gpu, float>::FreeState(RandGenerator* made) { OfCpu::FreeState(reinterpret_cast<OfCpu*>(made)); }

void RandGenerator<gpu, float>::Seed(mshadow::Stream<gpu>* stream, uint32_t seed) {
  reinterpret_cast<OfCpu*>(this)->Seed(nullptr, seed);
}

}  // namespace random
}  // namespace common
}  // namespace mxnet
