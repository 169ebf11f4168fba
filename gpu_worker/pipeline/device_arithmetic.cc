#include "gpu_worker/pipeline/device_arithmetic.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <iterator>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/check.h"
#include "cpu_optimizer_service/common/float_format.h"
#include "cpu_optimizer_service/common/gradient_norm.h"
#include "cpu_optimizer_service/common/status.h"
#include "gpu_worker/cuda/kernels/adam.h"
#include "gpu_worker/cuda/kernels/gradient.h"
#include "gpu_worker/pipeline/completions.h"

namespace ballast::worker {
namespace {

// All its work is on one stream, so each call's work begins after that of the calls before it.
// Payloads are complete when they are pushed.
class DeviceArithmetic final : public LocalArithmetic {
 public:
  DeviceArithmetic(Device& device, const Layout& layout, absl::Span<const GroupSpec> groups,
                   bool sums, WeightsAt weights)
      : device_(device),
        layout_(layout),
        groups_(groups),
        sums_(sums),
        weights_(std::move(weights)),
        begins_(layout.chunks().size(), -1),
        gradients_(layout.chunks().size(), nullptr) {}
  absl::Status Init(int rank);
  ~DeviceArithmetic() override;

  absl::Status SetFirstWeights(int chunk, absl::Span<const float> values) override;
  absl::Status AddGradients(std::vector<Addition> additions) override;
  absl::Status ZeroGradient(int chunk) override;
  absl::Status BlockSums(absl::Span<const BlocksInChunks> runs, absl::Span<double> sums) override;
  absl::Status ReadGradient(int chunk, int64_t begin, absl::Span<float> values) override;
  absl::Status Update(int chunk, int64_t begin, int64_t elements,
                      const AdamScalars& scalars) override;
  absl::Status TryUpdate(int chunk, int64_t begin, int64_t elements, const AdamScalars* scalars,
                         State& state) override;
  absl::Status Finish() override;
  void ForgetGradients() override;

 private:
  struct WantedValues {
    absl::Span<float> to;
    DType dtype;
    std::vector<std::byte> bytes;
  };

  const Chunk& chunk(int index) const { return layout_.chunks()[index]; }
  const GroupSpec& group(int index) const { return groups_[chunk(index).group]; }
  // The chunk's first element in the partition, whose state the planes are.
  int64_t begin(int index) const {
    Check(begins_[index] >= 0, "a rank's arithmetic is on its own chunks");
    return begins_[index];
  }
  absl::Status Synchronize();
  absl::Status AddRun(absl::Span<const Addition> run);
  // Where a chunk's gradient is read, and its format there.
  DType gradient_dtype(int index) const {
    return sums_ ? DType::kFloat32 : group(index).wire_dtype;
  }
  const std::byte* gradient(int index, int64_t from) const {
    Check(gradients_[index] != nullptr, "a gradient is read once it is there");
    return gradients_[index] + from * SizeBytes(gradient_dtype(index));
  }
  // That a run which goes on into the next chunks lies in one piece.
  void CheckRun(int index, int64_t from, int64_t elements) const;

  Device& device_;
  const Layout& layout_;
  const absl::Span<const GroupSpec> groups_;
  const bool sums_;
  const WeightsAt weights_;
  std::vector<int64_t> begins_;                  // By chunk; -1 for other ranks'.
  std::vector<const std::byte*> gradients_;      // By chunk; null: none in this step.
  std::vector<std::function<void()>> released_;  // Of the payloads that are the gradients.
  std::unique_ptr<DeviceMemory> sum_;            // Fp32, where pushes are summed.
  std::unique_ptr<DeviceMemory> master_, exp_avg_, exp_avg_sq_;  // Fp32 planes.
  std::unique_ptr<DeviceMemory> tried_;       // Of each plane what was tried last; usually null.
  std::unique_ptr<DeviceMemory> block_sums_;  // Doubles.
  std::unique_ptr<HostMemory> host_block_sums_;
  std::unique_ptr<DeviceMemory> runs_;  // The BlockRuns of one BlockSums.
  std::unique_ptr<HostMemory> host_runs_;
  // Since the last Finish.
  absl::Span<double> wanted_sums_;
  std::deque<WantedValues> wanted_values_;
  std::unique_ptr<DeviceEvent> done_;
  std::unique_ptr<DeviceStream> stream_;
  std::unique_ptr<Completions> releases_;  // Calls `released`.
};

absl::Status DeviceArithmetic::Init(int rank) {
  int64_t elements = 0;
  // A parameter's last block is short; there is one for each of its pieces.
  int64_t most_blocks = 0;
  for (const int index : layout_.chunks_of_rank(rank)) {
    begins_[index] = elements;
    elements += chunk(index).elements;
    most_blocks += chunk(index).elements / kBlockElements + 1;
    layout_.VisitPieces(index, [&](const ChunkPiece&) { ++most_blocks; });
  }
  BALLAST_ASSIGN_OR_RETURN(stream_, device_.CreateStream("optimizer"));
  BALLAST_ASSIGN_OR_RETURN(done_, device_.CreateEvent());
  releases_ = std::make_unique<Completions>(device_);
  // A small model has fewer blocks than ranks; some ranks then own nothing.
  if (elements == 0) return absl::OkStatus();
  if (sums_) {
    BALLAST_ASSIGN_OR_RETURN(
        sum_, device_.Allocate(elements * sizeof(float), "the optimizer's sums of gradients"));
    // A chunk's gradient has this place in all steps. ForgetGradients forgets places only without
    // sums.
    for (const int index : layout_.chunks_of_rank(rank)) {
      gradients_[index] = reinterpret_cast<std::byte*>(sum_->as<float>() + begin(index));
    }
  }
  for (auto& [plane, what] : {std::pair(&master_, "the optimizer's master weights"),
                              std::pair(&exp_avg_, "the optimizer's first moments"),
                              std::pair(&exp_avg_sq_, "the optimizer's second moments")}) {
    BALLAST_ASSIGN_OR_RETURN(*plane, device_.Allocate(elements * sizeof(float), what));
  }
  const size_t sums_bytes = most_blocks * sizeof(double);
  BALLAST_ASSIGN_OR_RETURN(block_sums_, device_.Allocate(sums_bytes, "sums of squares"));
  BALLAST_ASSIGN_OR_RETURN(host_block_sums_, device_.AllocateHost(sums_bytes, "sums of squares"));
  return absl::OkStatus();
}

DeviceArithmetic::~DeviceArithmetic() {
  // Work in progress ends before its memory does; a lost device has none.
  if (stream_ != nullptr) stream_->Synchronize().IgnoreError();
  // No kernel reads the payloads now. The calls that `releases_` still owes are made by its
  // destructor, which is the first of the members' to run.
  ForgetGradients();
}

absl::Status DeviceArithmetic::SetFirstWeights(int index, absl::Span<const float> values) {
  const size_t size_bytes = values.size() * sizeof(float);
  float* master = master_->as<float>() + begin(index);
  BALLAST_RETURN_IF_ERROR(stream_->CopyToDevice(
      master, {reinterpret_cast<const std::byte*>(values.data()), size_bytes}));
  for (const auto& moment : {exp_avg_.get(), exp_avg_sq_.get()}) {
    BALLAST_RETURN_IF_ERROR(stream_->Zero(moment->as<float>() + begin(index), size_bytes));
  }
  // The function is named after gradients, but it rounds any fp32 values.
  BALLAST_RETURN_IF_ERROR(cuda::RoundGradient(*stream_, values.size(), master,
                                              group(index).return_dtype, weights_(index).data()));
  return Synchronize();  // `values` are the caller's again.
}

absl::Status DeviceArithmetic::AddGradients(std::vector<Addition> additions) {
  if (additions.empty()) return absl::OkStatus();
  if (!sums_) {
    for (Addition& addition : additions) {
      Check(addition.first, "a step has one push of a chunk where nothing is summed");
      gradients_[addition.chunk] = addition.payload.data();
      if (addition.released != nullptr) released_.push_back(std::move(addition.released));
    }
    return absl::OkStatus();
  }
  // Neighbours, of which both payloads and sums lie one after the other, are one run.
  const auto goes_on = [&](const Addition& one, const Addition& next) {
    return one.payload.end() == next.payload.begin() && one.first == next.first &&
           begin(one.chunk) + chunk(one.chunk).elements == begin(next.chunk) &&
           group(one.chunk).wire_dtype == group(next.chunk).wire_dtype;
  };
  absl::Status status;
  for (size_t first = 0, end; first < additions.size() && status.ok(); first = end) {
    for (end = first + 1; end < additions.size(); ++end) {
      if (!goes_on(additions[end - 1], additions[end])) break;
    }
    status = AddRun(absl::MakeConstSpan(additions).subspan(first, end - first));
  }
  // Not before the device has read the payloads: their owner may write there as soon as they are
  // released.
  const auto release = [given = std::move(additions)](const absl::Status&) {
    for (const Addition& addition : given) {
      if (addition.released != nullptr) addition.released();
    }
  };
  if (status.ok()) status = releases_->After(*stream_, release);
  // Nothing else will call it: `releases_` did not take it. Each payload is released, also after an
  // error.
  if (!status.ok()) release(status);
  return status;
}

absl::Status DeviceArithmetic::AddRun(absl::Span<const Addition> run) {
  const Addition& first = run.front();
  int64_t elements = 0;
  for (const Addition& addition : run) elements += chunk(addition.chunk).elements;
  return cuda::AddWireGradient(*stream_, elements, first.payload.data(),
                               group(first.chunk).wire_dtype, /*assign=*/first.first,
                               sum_->as<float>() + begin(first.chunk));
}

absl::Status DeviceArithmetic::ZeroGradient(int index) {
  if (!sums_) {
    return absl::FailedPreconditionError(
        absl::StrCat("chunk ", index,
                     " has no gradient; an optimizer on the device has a payload of "
                     "every chunk in every step"));
  }
  return stream_->Zero(sum_->as<float>() + begin(index), chunk(index).elements * sizeof(float));
}

// All in one launch, from a table on the device.
absl::Status DeviceArithmetic::BlockSums(absl::Span<const BlocksInChunks> runs,
                                         absl::Span<double> sums) {
  if (runs.empty()) return absl::OkStatus();
  Check(sums.size() * sizeof(double) <= block_sums_->size_bytes(), "a block is summed once");
  const size_t bytes = runs.size() * sizeof(cuda::BlockRun);
  if (runs_ == nullptr || runs_->size_bytes() < bytes) {
    // The host's first: the condition asks for the size of the device's alone.
    BALLAST_ASSIGN_OR_RETURN(host_runs_,
                             device_.AllocateHost(bytes, "the optimizer's table of blocks"));
    BALLAST_ASSIGN_OR_RETURN(runs_, device_.Allocate(bytes, "the optimizer's table of blocks"));
  }
  // No copy reads the host's table now: there was a Finish since the last BlockSums, and that waits
  // for all work.
  const absl::Span<std::byte> host = host_runs_->bytes().subspan(0, bytes);
  auto* table = reinterpret_cast<cuda::BlockRun*>(host.data());
  int64_t blocks = 0;
  for (const BlocksInChunks& run : runs) {
    CheckRun(run.chunk, run.begin, run.elements);
    new (table++) cuda::BlockRun{.gradient = gradient(run.chunk, run.begin),
                                 .elements = run.elements,
                                 .first_block = blocks,
                                 .dtype = gradient_dtype(run.chunk)};
    blocks += run.blocks();
  }
  Check(blocks == static_cast<int64_t>(sums.size()), "there is a sum for each block");
  wanted_sums_ = sums;
  BALLAST_RETURN_IF_ERROR(stream_->CopyToDevice(runs_->data(), host));
  return cuda::BlockSumsOfSquares(*stream_, static_cast<int>(runs.size()),
                                  runs_->as<cuda::BlockRun>(), blocks, block_sums_->as<double>());
}

absl::Status DeviceArithmetic::ReadGradient(int index, int64_t from, absl::Span<float> values) {
  if (values.empty()) return absl::OkStatus();
  const DType dtype = gradient_dtype(index);
  // The elements come in the gradient's own format; Finish converts them when they are there.
  WantedValues& wanted = wanted_values_.emplace_back(
      WantedValues{.to = values,
                   .dtype = dtype,
                   .bytes = std::vector<std::byte>(values.size() * SizeBytes(dtype))});
  return stream_->CopyToHost(absl::MakeSpan(wanted.bytes), gradient(index, from));
}

void DeviceArithmetic::CheckRun(int index, int64_t from, int64_t elements) const {
  for (int64_t left = elements - (chunk(index).elements - from); left > 0; ++index) {
    Check(gradients_[index + 1] == gradient(index, chunk(index).elements) &&
              weights_(index + 1).data() == weights_(index).end(),
          "gradients and weights of neighbours lie one after the other");
    left -= chunk(index + 1).elements;
  }
}

absl::Status DeviceArithmetic::Update(int index, int64_t from, int64_t elements,
                                      const AdamScalars& scalars) {
  CheckRun(index, from, elements);
  const int64_t at = begin(index) + from;
  const DType return_dtype = group(index).return_dtype;
  // In place. There is no largest second moment: LocalOptimizer refuses amsgrad.
  return cuda::UpdateAdam(*stream_,
                          {.elements = elements,
                           .gradient = gradient(index, from),
                           .gradient_dtype = gradient_dtype(index),
                           .master = master_->as<float>() + at,
                           .exp_avg = exp_avg_->as<float>() + at,
                           .exp_avg_sq = exp_avg_sq_->as<float>() + at,
                           .max_exp_avg_sq = nullptr,
                           .new_master = master_->as<float>() + at,
                           .new_exp_avg = exp_avg_->as<float>() + at,
                           .new_exp_avg_sq = exp_avg_sq_->as<float>() + at,
                           .new_max_exp_avg_sq = nullptr,
                           .shard = weights_(index).data() + from * SizeBytes(return_dtype),
                           .shard_dtype = return_dtype,
                           .scalars = scalars});
}

// The update goes to scratch memory, and no weights are written: an overflow must be found before
// the state is changed, because an update in place cannot be undone.
absl::Status DeviceArithmetic::TryUpdate(int index, int64_t from, int64_t elements,
                                         const AdamScalars* scalars, State& state) {
  const int64_t at = begin(index) + from;
  const float* planes[] = {master_->as<float>() + at, exp_avg_->as<float>() + at,
                           exp_avg_sq_->as<float>() + at};
  if (scalars != nullptr) {
    constexpr size_t kPlanes = std::size(planes);
    const size_t bytes = kPlanes * static_cast<size_t>(elements) * sizeof(float);
    if (tried_ == nullptr || tried_->size_bytes() < bytes) {
      // The old memory is freed first, so that the device never needs room for both. No work uses
      // it: every TryUpdate waits for its own.
      tried_ = nullptr;
      BALLAST_ASSIGN_OR_RETURN(tried_, device_.Allocate(bytes, "a trial of an update"));
    }
    float* const tried = tried_->as<float>();
    BALLAST_RETURN_IF_ERROR(cuda::UpdateAdam(*stream_, {.elements = elements,
                                                        .gradient = gradient(index, from),
                                                        .gradient_dtype = gradient_dtype(index),
                                                        .master = planes[0],
                                                        .exp_avg = planes[1],
                                                        .exp_avg_sq = planes[2],
                                                        .max_exp_avg_sq = nullptr,
                                                        .new_master = tried,
                                                        .new_exp_avg = tried + elements,
                                                        .new_exp_avg_sq = tried + 2 * elements,
                                                        .new_max_exp_avg_sq = nullptr,
                                                        .shard = nullptr,
                                                        .shard_dtype = group(index).return_dtype,
                                                        .scalars = *scalars}));
    for (size_t plane = 0; plane < kPlanes; ++plane) planes[plane] = tried + plane * elements;
  }
  std::vector<float>* const to[] = {&state.master, &state.exp_avg, &state.exp_avg_sq};
  for (size_t plane = 0; plane < std::size(planes); ++plane) {
    to[plane]->resize(elements);
    BALLAST_RETURN_IF_ERROR(stream_->CopyToHost(
        {reinterpret_cast<std::byte*>(to[plane]->data()), elements * sizeof(float)},
        planes[plane]));
  }
  return Synchronize();
}

absl::Status DeviceArithmetic::Finish() {
  // The sums of all blocks come in one copy, through pinned memory, because the caller's memory is
  // not pinned.
  const absl::Span<double> wanted = std::exchange(wanted_sums_, {});
  absl::Span<std::byte> host;
  if (!wanted.empty()) {
    host = host_block_sums_->bytes().subspan(0, wanted.size() * sizeof(double));
    BALLAST_RETURN_IF_ERROR(stream_->CopyToHost(host, block_sums_->data()));
  }
  BALLAST_RETURN_IF_ERROR(Synchronize());
  if (!wanted.empty()) std::memcpy(wanted.data(), host.data(), host.size());
  for (const WantedValues& values : std::exchange(wanted_values_, {})) {
    for (size_t i = 0; i < values.to.size(); ++i) {
      values.to[i] = LoadElement(values.bytes.data(), values.dtype, i);
    }
  }
  return absl::OkStatus();
}

void DeviceArithmetic::ForgetGradients() {
  for (const std::function<void()>& released : std::exchange(released_, {})) released();
  if (!sums_) std::fill(gradients_.begin(), gradients_.end(), nullptr);
}

absl::Status DeviceArithmetic::Synchronize() {
  BALLAST_RETURN_IF_ERROR(stream_->Record(*done_));
  return done_->Synchronize();
}

}  // namespace

absl::StatusOr<std::unique_ptr<LocalArithmetic>> MakeDeviceArithmetic(
    Device& device, const Layout& layout, absl::Span<const GroupSpec> groups, int rank, bool sums,
    WeightsAt weights) {
  auto arithmetic =
      std::make_unique<DeviceArithmetic>(device, layout, groups, sums, std::move(weights));
  BALLAST_RETURN_IF_ERROR(arithmetic->Init(rank));
  return arithmetic;
}

}  // namespace ballast::worker
