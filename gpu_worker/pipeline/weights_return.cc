#include "gpu_worker/pipeline/weights_return.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/check.h"
#include "cpu_optimizer_service/common/status.h"
#include "gpu_worker/device/matmul.h"
#include "gpu_worker/pipeline/pinned_spans.h"
#include "gpu_worker/pipeline/pipeline_errors.h"

namespace ballast::worker {
namespace {

constexpr int64_t kElementBytes = sizeof(BFloat16Bits);

}  // namespace

WeightsReturn::WeightsReturn(const TrainingJob& job, const BucketOrder& order,
                             std::vector<absl::Span<std::byte>> live,
                             const WeightsReturnOptions& options, DeviceTrace& trace)
    : job_(job),
      order_(order),
      live_(std::move(live)),
      options_(options),
      trace_(trace),
      targets_(job.layout.chunks().size()),
      arriving_(job.layout.chunks().size()),
      awaited_(job.buckets.size(), false) {}

absl::StatusOr<std::unique_ptr<WeightsReturn>> WeightsReturn::Create(
    Device& device, const TrainingJob& job, const BucketOrder& order,
    std::vector<absl::Span<std::byte>> live, const WeightsReturnOptions& options,
    DeviceTrace& trace) {
  std::unique_ptr<WeightsReturn> self(
      new WeightsReturn(job, order, std::move(live), options, trace));
  BALLAST_RETURN_IF_ERROR(self->Init(device));
  return self;
}

absl::Status WeightsReturn::Init(Device& device) {
  device_ = &device;
  MutexLock lock(mutex_);
  BALLAST_ASSIGN_OR_RETURN(copies_.stream, device.CreateStream("copy_in"));
  BALLAST_ASSIGN_OR_RETURN(copies_.last, device.CreateEvent());
  size_t buffer_bytes = 0;
  for (const Bucket& bucket : job_.buckets) buffer_bytes += bucket.shard_elements * kElementBytes;
  std::byte* next = nullptr;
  if (options_.provisional && !options_.on_device && buffer_bytes > 0) {
    BALLAST_ASSIGN_OR_RETURN(buffer_, device.Allocate(buffer_bytes, "provisional weights"));
    next = buffer_->data();
  }
  for (const Bucket& bucket : job_.buckets) {
    PerBucket& made = buckets_.emplace_back();
    made.shard = ShardOf(job_.layout, bucket, options_.rank);
    // The whole shard, also what is past the bucket's end: an all-gather takes one size from every
    // rank.
    const size_t shard_bytes = bucket.shard_elements * kElementBytes;
    const int64_t begin = bucket.begin + options_.rank * bucket.shard_elements;
    made.mine = {buffer_ == nullptr ? live_[bucket.group].data() + begin * kElementBytes
                                    : std::exchange(next, next + shard_bytes),
                 shard_bytes};
    for (const int chunk : made.shard.chunks) {
      targets_[chunk].bucket = static_cast<int>(buckets_.size()) - 1;
      targets_[chunk].data =
          made.mine.data() + (job_.layout.chunks()[chunk].begin - begin) * kElementBytes;
    }
    BALLAST_ASSIGN_OR_RETURN(made.copied, device.CreateEvent());
    BALLAST_ASSIGN_OR_RETURN(made.gathered, device.CreateEvent());
  }
  return absl::OkStatus();
}

WeightsReturn::~WeightsReturn() {
  MutexLock lock(mutex_);
  // Copies read the host memory until they are done; a device that is lost does none.
  if (copies_.last != nullptr) WaitForCopies().IgnoreError();
}

// ---------------------------------------------------------------- weights as they arrive

size_t WeightsReturn::SizeBytesOf(int chunk) const {
  return job_.layout.chunks()[chunk].elements * kElementBytes;
}

absl::Span<std::byte> WeightsReturn::at(int chunk) const {
  if (!options_.on_device) return {};
  return {targets_[chunk].data, SizeBytesOf(chunk)};
}

absl::Status WeightsReturn::Use(const std::function<absl::Span<std::byte>(int chunk)>& memory) {
  if (options_.on_device) return absl::OkStatus();
  MutexLock lock(mutex_);
  // Copies from the old memory end before it is unpinned.
  const absl::Status copied = WaitForCopies();
  pins_.clear();
  for (Arriving& chunk : arriving_) chunk.copied = chunk.provisional = chunk.arrived = false;
  std::vector<absl::Span<std::byte>> spans;
  for (const int chunk : job_.layout.chunks_of_rank(options_.rank)) {
    const absl::Span<std::byte> place = memory(chunk);
    Check(place.empty() || place.size() == SizeBytesOf(chunk),
          "the optimizer's memory for a chunk's weights has their size");
    arriving_[chunk].place = place;
    spans.push_back(place);
  }
  // Not before this: also after an error the old memory is unpinned, because its owner is about to
  // free it.
  BALLAST_RETURN_IF_ERROR(copied);
  BALLAST_ASSIGN_OR_RETURN(
      pins_, PinSpans(*device_, std::move(spans), "the optimizer's memory for weights"));
  return absl::OkStatus();
}

absl::Status WeightsReturn::WaitForCopies() {
  // If CopyIn returned an error, `last` stands for earlier copies, and the stream itself is
  // awaited.
  const absl::Status copied =
      copies_.marked ? copies_.last->Synchronize() : copies_.stream->Synchronize();
  // After an error copies may still be in progress.
  if (!copied.ok()) copies_.stream->Synchronize().IgnoreError();
  return copied;
}

// No copy reads bytes that are being replaced, except of weights that are dropped: the session
// writes others only after the chunk's final push of the next step (client/session.h), and the pass
// before that push waits for this copy.
absl::Status WeightsReturn::CopyIn(int bucket) {
  copies_.marked = false;
  DeviceStream& stream = *copies_.stream;
  absl::Span<const std::byte> row;  // Neighbours, here and on the device.
  std::byte* to = nullptr;
  int first = -1;
  int last = -1;
  const uint64_t step = copies_.step;
  const auto end_row = [&]() -> absl::Status {
    if (row.empty()) return absl::OkStatus();
    const SpanOf of{.step = step, .bucket = bucket, .chunk = first == last ? first : -1};
    return Annotate(trace_.Around(stream, Track::kCopy, of,
                                  [&] { return stream.CopyToDevice(to, std::exchange(row, {})); }),
                    absl::StrCat("copying the weights of chunk ", first));
  };
  // Without the buffer a copy goes to the live weights. These are decided ones, and no pass whose
  // result counts still reads the old ones: FinishStep has waited for the step's passes.
  for (const int chunk : buckets_[bucket].shard.chunks) {
    const absl::Span<const std::byte> from = arriving_[chunk].place;
    if (arriving_[chunk].copied || from.empty()) continue;
    arriving_[chunk].copied = true;
    if (!row.empty() && row.end() == from.begin() && to + row.size() == targets_[chunk].data) {
      row = {row.data(), row.size() + from.size()};
    } else {
      BALLAST_RETURN_IF_ERROR(end_row());
      row = from;
      to = targets_[chunk].data;
      first = chunk;
    }
    last = chunk;
  }
  BALLAST_RETURN_IF_ERROR(end_row());
  BALLAST_RETURN_IF_ERROR(stream.Record(*copies_.last));
  copies_.marked = true;
  return absl::OkStatus();
}

void WeightsReturn::OnProvisional(int chunk) {
  MutexLock lock(mutex_);
  if (buffer_ == nullptr || arriving_[chunk].place.empty()) return;  // Copied when they are final.
  arriving_[chunk].provisional = true;
  const int bucket = targets_[chunk].bucket;
  // A whole bucket at a time, because neighbours are then one copy; the gather needs the whole
  // bucket anyway.
  if (CanBeCopied(buckets_[bucket])) copies_.status.Update(CopyIn(bucket));
}

void WeightsReturn::OnDropped(int chunk) {
  MutexLock lock(mutex_);
  // A copy of it may be in progress and read bytes that are being replaced. The chunk is copied
  // again later, on the same stream, so the new bytes are the last.
  arriving_[chunk].provisional = false;
  arriving_[chunk].copied = false;
}

void WeightsReturn::OnWeights(int chunk) {
  MutexLock lock(mutex_);
  arriving_[chunk].arrived = true;
  const int bucket = targets_[chunk].bucket;
  if (!HasArrived(buckets_[bucket])) return;
  // Provisional weights that were not dropped are final now, and their copies count.
  bool copied = true;
  for (const int of_bucket : buckets_[bucket].shard.chunks) copied &= arriving_[of_bucket].copied;
  if (!copied) copies_.status.Update(CopyIn(bucket));
  changed_.NotifyAll();
}

// ---------------------------------------------------------------- the gather

void WeightsReturn::Expect(uint64_t step, bool all_there) {
  step_ = step;
  MutexLock lock(mutex_);
  all_there_ = all_there;
  abandoned_ = false;
  std::fill(awaited_.begin(), awaited_.end(), true);
  for (PerBucket& bucket : buckets_) bucket.waited_for = false;
}

void WeightsReturn::Abandon() {
  MutexLock lock(mutex_);
  abandoned_ = true;
  changed_.NotifyAll();
}

void WeightsReturn::Stop() {
  MutexLock lock(mutex_);
  stopped_ = true;
  changed_.NotifyAll();
}

bool WeightsReturn::HasArrived(const PerBucket& bucket) const {
  for (const int chunk : bucket.shard.chunks) {
    if (!arriving_[chunk].arrived) return false;
  }
  return true;
}

bool WeightsReturn::CanBeCopied(const PerBucket& bucket) const {
  for (const int chunk : bucket.shard.chunks) {
    if (!arriving_[chunk].arrived && !arriving_[chunk].provisional) return false;
  }
  return true;
}

absl::Status WeightsReturn::CopyRest(int index) {
  PerBucket& bucket = buckets_[index];
  MutexLock lock(mutex_);
  while (!stopped_ && !abandoned_ && !all_there_ && !HasArrived(bucket)) changed_.Wait(mutex_);
  if (stopped_) return Stopped();
  BALLAST_RETURN_IF_ERROR(copies_.status);
  bool copied = true;
  for (const int chunk : bucket.shard.chunks) {
    Check(arriving_[chunk].copied || abandoned_ || !arriving_[chunk].place.empty(),
          "an optimizer on the host has memory for weights");
    copied &= arriving_[chunk].copied;
  }
  // Weights that arrived without a notice, for example in a Join.
  if (!copied && !abandoned_) BALLAST_RETURN_IF_ERROR(CopyIn(index));
  // Cleared here and not in Expect: provisional weights of the next step come before its Expect.
  for (const int chunk : bucket.shard.chunks) {
    arriving_[chunk].copied = arriving_[chunk].arrived = arriving_[chunk].provisional =
        false;  // The next weights are others.
  }
  return copies_.stream->Record(*bucket.copied);
}

absl::Status WeightsReturn::Gather(DeviceStream& communicate, DeviceCollective& collective) {
  // Forward needs the buckets in the reverse of backward's order.
  for (auto b = order_.reduction.rbegin(); b != order_.reduction.rend(); ++b) {
    BALLAST_RETURN_IF_ERROR(GatherBucket(communicate, collective, *b));
  }
  MutexLock lock(mutex_);
  copies_.step = step_ + 1;
  // The next weights are copied over what these gathers read.
  if (order_.reduction.empty() || options_.on_device) return absl::OkStatus();
  // The first bucket in backward's order was gathered last, and `communicate` works in order.
  return copies_.stream->Wait(*buckets_[order_.reduction.front()].gathered);
}

absl::Status WeightsReturn::GatherBucket(DeviceStream& communicate, DeviceCollective& collective,
                                         int index) {
  const Bucket& bucket = job_.buckets[index];
  PerBucket& state = buckets_[index];
  if (!options_.on_device) {
    BALLAST_RETURN_IF_ERROR(CopyRest(index));
    BALLAST_RETURN_IF_ERROR(communicate.Wait(*state.copied));
  }
  std::byte* all = live_[bucket.group].data() + bucket.begin * kElementBytes;
  BALLAST_RETURN_IF_ERROR(
      trace_.Around(communicate, Track::kGather, {.step = step_, .bucket = index}, [&] {
        return collective.AllGather(communicate, state.mine.data(), all, state.mine.size(),
                                    {.step = step_, .bucket = index});
      }));
  BALLAST_RETURN_IF_ERROR(communicate.Record(*state.gathered));
  MutexLock lock(mutex_);
  // After the Record: a pass that sees this makes its stream wait for the event.
  awaited_[index] = false;
  changed_.NotifyAll();
  return absl::OkStatus();
}

// ---------------------------------------------------------------- the passes

absl::Status WeightsReturn::AwaitGiven(int bucket) {
  MutexLock lock(mutex_);
  while (!stopped_ && awaited_[bucket]) changed_.Wait(mutex_);
  return awaited_[bucket] ? Stopped() : absl::OkStatus();
}

absl::StatusOr<bool> WeightsReturn::IsThere(int bucket) {
  {
    MutexLock lock(mutex_);
    if (awaited_[bucket]) return false;
  }
  // Without the lock: only Expect makes the bucket awaited again, and the passes' own thread calls
  // that.
  return buckets_[bucket].gathered->Done();
}

absl::Status WeightsReturn::Before(DeviceStream& stream, int bucket, StreamSeconds& waited) {
  PerBucket& state = buckets_[bucket];
  if (state.waited_for) return absl::OkStatus();
  state.waited_for = true;
  BALLAST_ASSIGN_OR_RETURN(const bool there, IsThere(bucket));
  if (there) return absl::OkStatus();
  // The wait on the host is between the two events too, because the stream has no work meanwhile.
  return waited.Around(stream, [&] {
    return trace_.Around(stream, Track::kStall, {.step = step_, .bucket = bucket}, [&] {
      BALLAST_RETURN_IF_ERROR(AwaitGiven(bucket));
      return stream.Wait(*state.gathered);
    });
  });
}

absl::Status WeightsReturn::BeforeWeights(DeviceStream& stream, int parameter,
                                          StreamSeconds& waited) {
  for (const int bucket : order_.buckets_of_parameter[parameter]) {
    BALLAST_RETURN_IF_ERROR(Before(stream, bucket, waited));
  }
  return absl::OkStatus();
}

absl::Status WeightsReturn::BeforeGroup(DeviceStream& stream, int group, StreamSeconds& waited) {
  for (size_t b = 0; b < buckets_.size(); ++b) {
    if (job_.buckets[b].group != group) continue;
    BALLAST_RETURN_IF_ERROR(Before(stream, static_cast<int>(b), waited));
  }
  return absl::OkStatus();
}

}  // namespace ballast::worker
