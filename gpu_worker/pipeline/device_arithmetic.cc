#include "gpu_worker/pipeline/device_arithmetic.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/check.h"
#include "cpu_optimizer_service/common/gradient_norm.h"
#include "cpu_optimizer_service/common/status.h"
#include "gpu_worker/cuda/kernels/adam.h"
#include "gpu_worker/cuda/kernels/gradient.h"
#include "gpu_worker/pipeline/completions.h"

namespace ballast::worker {
namespace {

class DeviceArithmetic final : public LocalArithmetic {
 public:
  DeviceArithmetic(Device& device, const Layout& layout, absl::Span<const GroupSpec> groups,
                   WeightsAt weights)
      : device_(device),
        layout_(layout),
        groups_(groups),
        weights_(std::move(weights)),
        begins_(layout.chunks().size(), -1) {}
  absl::Status Init(int rank);
  ~DeviceArithmetic() override;

  absl::Status SetFirstWeights(int chunk, absl::Span<const float> values) override;
  absl::Status AddGradient(int chunk, bool first, absl::Span<const std::byte> payload,
                           std::function<void()> released) override;
  absl::Status ZeroGradient(int chunk) override;
  absl::Status BlockSums(int chunk, int64_t begin, absl::Span<double> sums) override;
  absl::Status ReadGradient(int chunk, int64_t begin, absl::Span<float> values) override;
  absl::Status Update(int chunk, int64_t begin, int64_t elements,
                      const AdamScalars& scalars) override;
  absl::Status TryUpdate(int chunk, int64_t begin, int64_t elements, const AdamScalars* scalars,
                         State& state) override;
  absl::Status Finish() override;

 private:
  struct WantedSums {
    int64_t first = 0;  // In block_sums_.
    absl::Span<double> to;
  };

  const Chunk& chunk(int index) const { return layout_.chunks()[index]; }
  const GroupSpec& group(int index) const { return groups_[chunk(index).group]; }
  // The chunk's first element in the partition, whose state the planes are.
  int64_t begin(int index) const {
    Check(begins_[index] >= 0, "a rank's arithmetic is on its own chunks");
    return begins_[index];
  }
  absl::Status Synchronize();

  Device& device_;
  const Layout& layout_;
  const absl::Span<const GroupSpec> groups_;
  const WeightsAt weights_;
  std::vector<int64_t> begins_;  // By chunk; -1 for other ranks'.
  std::unique_ptr<DeviceMemory> gradient_, master_, exp_avg_, exp_avg_sq_;  // Fp32 planes.
  std::unique_ptr<DeviceMemory> tried_;       // Of each plane what was tried last; usually null.
  std::unique_ptr<DeviceMemory> block_sums_;  // Doubles, as below.
  std::unique_ptr<HostMemory> host_block_sums_;
  std::vector<WantedSums> wanted_sums_;  // Since the last Finish.
  std::unique_ptr<DeviceEvent> done_;
  std::unique_ptr<DeviceStream> stream_;
  std::unique_ptr<Completions> releases_;  // Calls `released`.
};

absl::Status DeviceArithmetic::Init(int rank) {
  int64_t elements = 0;
  for (const int index : layout_.chunks_of_rank(rank)) {
    begins_[index] = elements;
    elements += chunk(index).elements;
  }
  BALLAST_ASSIGN_OR_RETURN(stream_, device_.CreateStream("optimizer"));
  BALLAST_ASSIGN_OR_RETURN(done_, device_.CreateEvent());
  releases_ = std::make_unique<Completions>(device_);
  if (elements == 0) return absl::OkStatus();
  for (auto& [plane, what] : {std::pair(&gradient_, "the optimizer's gradients"),
                              std::pair(&master_, "the optimizer's master weights"),
                              std::pair(&exp_avg_, "the optimizer's first moments"),
                              std::pair(&exp_avg_sq_, "the optimizer's second moments")}) {
    BALLAST_ASSIGN_OR_RETURN(*plane, device_.Allocate(elements * sizeof(float), what));
  }
  const size_t sums_bytes = elements / kBlockElements * sizeof(double);
  BALLAST_ASSIGN_OR_RETURN(block_sums_, device_.Allocate(sums_bytes, "sums of squares"));
  BALLAST_ASSIGN_OR_RETURN(host_block_sums_, device_.AllocateHost(sums_bytes, "sums of squares"));
  return absl::OkStatus();
}

DeviceArithmetic::~DeviceArithmetic() {
  // Work in progress ends before its memory does; a lost device has none.
  if (stream_ != nullptr) stream_->Synchronize().IgnoreError();
}

absl::Status DeviceArithmetic::SetFirstWeights(int index, absl::Span<const float> values) {
  const size_t size_bytes = values.size() * sizeof(float);
  float* master = master_->as<float>() + begin(index);
  BALLAST_RETURN_IF_ERROR(stream_->CopyToDevice(
      master, {reinterpret_cast<const std::byte*>(values.data()), size_bytes}));
  for (const auto& moment : {exp_avg_.get(), exp_avg_sq_.get()}) {
    BALLAST_RETURN_IF_ERROR(stream_->Zero(moment->as<float>() + begin(index), size_bytes));
  }
  BALLAST_RETURN_IF_ERROR(cuda::RoundGradient(*stream_, values.size(), master,
                                              group(index).return_dtype, weights_(index).data()));
  return Synchronize();  // `values` are the caller's again.
}

absl::Status DeviceArithmetic::AddGradient(int index, bool first,
                                           absl::Span<const std::byte> payload,
                                           std::function<void()> released) {
  absl::Status status = cuda::AddWireGradient(*stream_, chunk(index).elements, payload.data(),
                                              group(index).wire_dtype, /*assign=*/first,
                                              gradient_->as<float>() + begin(index));
  if (released == nullptr) return status;
  if (status.ok()) {
    status = releases_->After(*stream_, [released](const absl::Status&) { released(); });
  }
  if (!status.ok()) released();
  return status;
}

absl::Status DeviceArithmetic::ZeroGradient(int index) {
  return stream_->Zero(gradient_->as<float>() + begin(index),
                       chunk(index).elements * sizeof(float));
}

absl::Status DeviceArithmetic::BlockSums(int index, int64_t from, absl::Span<double> sums) {
  if (sums.empty()) return absl::OkStatus();
  const auto blocks = static_cast<int64_t>(sums.size());
  const int64_t first =
      wanted_sums_.empty()
          ? 0
          : wanted_sums_.back().first + static_cast<int64_t>(wanted_sums_.back().to.size());
  Check(from + blocks * kBlockElements <= chunk(index).elements, "blocks lie in their chunk");
  Check((first + blocks) * sizeof(double) <= block_sums_->size_bytes(), "a block is summed once");
  wanted_sums_.push_back({.first = first, .to = sums});
  return cuda::BlockSumsOfSquares(*stream_, blocks, gradient_->as<float>() + begin(index) + from,
                                  block_sums_->as<double>() + first);
}

absl::Status DeviceArithmetic::ReadGradient(int index, int64_t from, absl::Span<float> values) {
  if (values.empty()) return absl::OkStatus();
  return stream_->CopyToHost(
      {reinterpret_cast<std::byte*>(values.data()), values.size() * sizeof(float)},
      gradient_->as<float>() + begin(index) + from);
}

absl::Status DeviceArithmetic::Update(int index, int64_t from, int64_t elements,
                                      const AdamScalars& scalars) {
  const int64_t at = begin(index) + from;
  const DType return_dtype = group(index).return_dtype;
  return cuda::UpdateAdam(*stream_,
                          {.elements = elements,
                           .gradient = gradient_->as<float>() + at,
                           .gradient_dtype = DType::kFloat32,
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

absl::Status DeviceArithmetic::TryUpdate(int index, int64_t from, int64_t elements,
                                         const AdamScalars* scalars, State& state) {
  const int64_t at = begin(index) + from;
  const float* planes[] = {master_->as<float>() + at, exp_avg_->as<float>() + at,
                           exp_avg_sq_->as<float>() + at};
  if (scalars != nullptr) {
    constexpr size_t kPlanes = std::size(planes);
    const size_t bytes = kPlanes * static_cast<size_t>(elements) * sizeof(float);
    if (tried_ == nullptr || tried_->size_bytes() < bytes) {
      tried_ = nullptr;
      BALLAST_ASSIGN_OR_RETURN(tried_, device_.Allocate(bytes, "a trial of an update"));
    }
    float* const tried = tried_->as<float>();
    BALLAST_RETURN_IF_ERROR(cuda::UpdateAdam(*stream_, {.elements = elements,
                                                        .gradient = gradient_->as<float>() + at,
                                                        .gradient_dtype = DType::kFloat32,
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

// All sums that were asked for leave in one copy.
absl::Status DeviceArithmetic::Finish() {
  if (wanted_sums_.empty()) return Synchronize();
  const absl::Span<std::byte> host = host_block_sums_->bytes();
  const std::vector<WantedSums> wanted = std::exchange(wanted_sums_, {});
  const size_t bytes = (wanted.back().first + wanted.back().to.size()) * sizeof(double);
  BALLAST_RETURN_IF_ERROR(stream_->CopyToHost(host.subspan(0, bytes), block_sums_->data()));
  BALLAST_RETURN_IF_ERROR(Synchronize());
  for (const WantedSums& sums : wanted) {
    std::memcpy(sums.to.data(), host.data() + sums.first * sizeof(double),
                sums.to.size() * sizeof(double));
  }
  return absl::OkStatus();
}

absl::Status DeviceArithmetic::Synchronize() {
  BALLAST_RETURN_IF_ERROR(stream_->Record(*done_));
  return done_->Synchronize();
}

}  // namespace

absl::StatusOr<std::unique_ptr<LocalArithmetic>> MakeDeviceArithmetic(
    Device& device, const Layout& layout, absl::Span<const GroupSpec> groups, int rank,
    WeightsAt weights) {
  auto arithmetic = std::make_unique<DeviceArithmetic>(device, layout, groups, std::move(weights));
  BALLAST_RETURN_IF_ERROR(arithmetic->Init(rank));
  return arithmetic;
}

}  // namespace ballast::worker
