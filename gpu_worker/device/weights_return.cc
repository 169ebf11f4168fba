#include "gpu_worker/device/weights_return.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "gpu_worker/device/matmul.h"

namespace ballast::worker {
namespace {

constexpr int64_t kElementBytes = sizeof(BFloat16Bits);

}  // namespace

WeightsReturn::WeightsReturn(const TrainingJob& job, const BucketOrder& order,
                             std::vector<absl::Span<std::byte>> live, bool on_device,
                             DeviceTrace& trace)
    : job_(job),
      order_(order),
      live_(std::move(live)),
      on_device_(on_device),
      trace_(trace),
      places_(job.layout.chunks().size()),
      copied_(job.layout.chunks().size(), false) {}

absl::StatusOr<std::unique_ptr<WeightsReturn>> WeightsReturn::Create(
    Device& device, const TrainingJob& job, const BucketOrder& order,
    std::vector<absl::Span<std::byte>> live, int rank, bool on_device, DeviceTrace& trace) {
  std::unique_ptr<WeightsReturn> self(
      new WeightsReturn(job, order, std::move(live), on_device, trace));
  for (const Bucket& bucket : job.buckets) {
    PerBucket& made = self->buckets_.emplace_back();
    made.shard = ShardOf(job.layout, bucket, rank);
    BALLAST_ASSIGN_OR_RETURN(made.copied, device.CreateEvent());
    BALLAST_ASSIGN_OR_RETURN(made.gathered, device.CreateEvent());
  }
  {
    MutexLock lock(self->mutex_);
    BALLAST_ASSIGN_OR_RETURN(self->copy_in_, device.CreateStream("copy_in"));
  }
  const size_t bytes = job.layout.partition_elements(rank) * kElementBytes;
  if (on_device || bytes == 0) return self;
  BALLAST_ASSIGN_OR_RETURN(self->host_, device.AllocateHost(bytes, "weights from the optimizer"));
  std::byte* next = self->host_->bytes().data();
  for (const int chunk : job.layout.chunks_of_rank(rank)) {
    self->places_[chunk] = {next, self->live(chunk).size()};
    next += self->places_[chunk].size();
  }
  return self;
}

WeightsReturn::~WeightsReturn() {
  MutexLock lock(mutex_);
  // Copies read the host memory until they are done; a device that is lost does none.
  if (copy_in_ != nullptr) copy_in_->Synchronize().IgnoreError();
}

absl::Span<std::byte> WeightsReturn::live(int index) const {
  const Chunk& chunk = job_.layout.chunks()[index];
  return live_[chunk.group].subspan(chunk.begin * kElementBytes, chunk.elements * kElementBytes);
}

absl::Span<std::byte> WeightsReturn::at(int chunk) {
  if (on_device_) return live(chunk);
  MutexLock lock(mutex_);
  copied_[chunk] = false;
  return places_[chunk];
}

absl::Status WeightsReturn::CopyIn(int chunk) {
  copied_[chunk] = true;
  DeviceStream& stream = *copy_in_;
  return Annotate(
      trace_.Around(stream, Track::kCopy, {.step = next_step_, .chunk = chunk},
                    [&] { return stream.CopyToDevice(live(chunk).data(), places_[chunk]); }),
      absl::StrCat("copying the weights of chunk ", chunk));
}

void WeightsReturn::OnWeights(int chunk) {
  if (on_device_) return;
  MutexLock lock(mutex_);
  const absl::Status status = CopyIn(chunk);
  if (copy_status_.ok()) copy_status_ = status;
}

absl::Status WeightsReturn::CopyRest(PerBucket& bucket) {
  MutexLock lock(mutex_);
  BALLAST_RETURN_IF_ERROR(copy_status_);
  for (const int chunk : bucket.shard.chunks) {
    if (!copied_[chunk]) BALLAST_RETURN_IF_ERROR(CopyIn(chunk));
    copied_[chunk] = false;  // The next weights are others.
  }
  return copy_in_->Record(*bucket.copied);
}

absl::Status WeightsReturn::Gather(DeviceStream& communicate, DeviceCollective& collective,
                                   uint64_t step) {
  const DeviceEvent* last = nullptr;
  for (auto b = order_.reduction.rbegin(); b != order_.reduction.rend(); ++b) {
    const Bucket& bucket = job_.buckets[*b];
    PerBucket& state = buckets_[*b];
    if (!on_device_) {
      BALLAST_RETURN_IF_ERROR(CopyRest(state));
      BALLAST_RETURN_IF_ERROR(communicate.Wait(*state.copied));
    }
    const size_t shard_bytes = bucket.shard_elements * kElementBytes;
    std::byte* all = live_[bucket.group].data() + bucket.begin * kElementBytes;
    BALLAST_RETURN_IF_ERROR(
        trace_.Around(communicate, Track::kGather, {.step = step, .bucket = *b}, [&] {
          return collective.AllGather(communicate, all + collective.rank() * shard_bytes, all,
                                      shard_bytes, {.step = step, .bucket = *b});
        }));
    BALLAST_RETURN_IF_ERROR(communicate.Record(*state.gathered));
    state.waited_for = false;
    last = state.gathered.get();
  }
  MutexLock lock(mutex_);
  next_step_ = step + 1;
  // The next weights are copied over what these gathers read.
  if (last == nullptr || on_device_) return absl::OkStatus();
  return copy_in_->Wait(*last);
}

absl::Status WeightsReturn::Before(DeviceStream& stream, int bucket) {
  if (buckets_[bucket].waited_for) return absl::OkStatus();
  buckets_[bucket].waited_for = true;
  return stream.Wait(*buckets_[bucket].gathered);
}

absl::Status WeightsReturn::BeforeWeights(DeviceStream& stream, int parameter) {
  for (const int bucket : order_.buckets_of_parameter[parameter]) {
    BALLAST_RETURN_IF_ERROR(Before(stream, bucket));
  }
  return absl::OkStatus();
}

absl::Status WeightsReturn::BeforeGroup(DeviceStream& stream, int group) {
  for (size_t b = 0; b < buckets_.size(); ++b) {
    if (job_.buckets[b].group != group) continue;
    BALLAST_RETURN_IF_ERROR(Before(stream, static_cast<int>(b)));
  }
  return absl::OkStatus();
}

}  // namespace ballast::worker
