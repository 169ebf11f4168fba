// The streams and events here are the middle of device_backend.cc's table.
#include "gpu_worker/pipeline/gradient_path.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "gpu_worker/buckets/non_finite.h"

namespace ballast::worker {

absl::StatusOr<std::unique_ptr<GradientPath>> GradientPath::Create(
    const Parts& parts, const GradientSlotsOptions& options) {
  std::unique_ptr<GradientPath> self(new GradientPath(parts, options));
  BALLAST_RETURN_IF_ERROR(self->Init());
  return self;
}

absl::Status GradientPath::Init() {
  const TrainingJob& job = parts_.job;
  size_t largest_bytes = 0;
  for (const Bucket& bucket : job.buckets) {
    const RankShard& shard = shards_.emplace_back(ShardOf(job.layout, bucket, options_.rank));
    largest_bytes = std::max<size_t>(
        largest_bytes, shard.elements * SizeBytes(job.spec.groups[bucket.group].wire_dtype));
  }
  BALLAST_ASSIGN_OR_RETURN(
      places_, GradientSlots::Create(parts_.device, job.layout, job.spec.groups, options_));
  if (!options_.on_device && largest_bytes > 0) {
    // Two: while one is copied to the host, the next bucket is rounded into the other.
    for (WireBuffer& wire : wire_) {
      BALLAST_ASSIGN_OR_RETURN(wire.memory, parts_.device.Allocate(largest_bytes, "a wire buffer"));
      BALLAST_ASSIGN_OR_RETURN(wire.copied_out, parts_.device.CreateEvent());
    }
  }
  sender_ = std::make_unique<GradientSender>(parts_.device, parts_.errors, parts_.trace.timeline());
  thread_ = std::thread([this] { Run(); });
  return absl::OkStatus();
}

GradientPath::~GradientPath() { End(); }

void GradientPath::End() {
  if (!thread_.joinable()) return;
  Stop();
  parts_.buckets.Stop();
  thread_.join();
  // With an error the sender releases what it has and pushes nothing.
  parts_.errors.FailStep(Stopped());
  // Before the sender is destroyed: its last calls wait for events of these streams, and without
  // this they could wait for a rank that has gone.
  WaitForStreams();
  sender_.reset();
}

// After a failure a copy to the optimizer's memory may be in progress that no event follows.
void GradientPath::WaitForStreams() {
  // What the streams still have may wait for a rank that has gone: here that is given up.
  parts_.collective.Finish().IgnoreError();
  parts_.communicate.Synchronize().IgnoreError();
  parts_.copy_out.Synchronize().IgnoreError();
}

void GradientPath::Stop() {
  places_->Cancel();
  MutexLock lock(mutex_);
  stopped_ = true;
  changed_.NotifyAll();
}

void GradientPath::Give(std::function<void()> work) {
  MutexLock lock(mutex_);
  given_.push_back(std::move(work));
  changed_.NotifyAll();
}

void GradientPath::WaitGiven() {
  MutexLock lock(mutex_);
  // After Stop the thread may still be in its last work.
  while ((stopped_ || !given_.empty()) && !left_) changed_.Wait(mutex_);
}

void GradientPath::BeginPass(const Pass& pass) {
  {
    MutexLock lock(mutex_);
    newest_ = pass;
  }
  Give([this, pass] { Fail(Communicate(pass), pass); });
}

void GradientPath::EndPass(UsedParameters used) {
  MutexLock lock(mutex_);
  // Passes end in the order in which they began, and the thread takes one entry for each.
  used_.push_back(std::move(used));
  changed_.NotifyAll();
}

void GradientPath::WaitReduced() {
  WaitGiven();
  const Pass pass = [this] {
    MutexLock lock(mutex_);
    return newest_;
  }();
  // All work is given by now, so the event's last Record is that of the newest reduction.
  const std::vector<int>& order = parts_.buckets.order().reduction;
  if (order.empty() || !parts_.errors.failure().ok()) return;
  // With the last bucket in order, all before it are reduced.
  const absl::Status reduced = parts_.buckets.released(order.back()).Synchronize();
  // A collective that was aborted leaves sums that are not whole, and the device says that all is
  // done: only the collective knows.
  Fail(reduced.ok() ? parts_.collective.Finish() : reduced, pass);
}

void GradientPath::WaitSent() {
  sender_->WaitIdle();
  if (!parts_.errors.failure().ok()) WaitForStreams();
}

void GradientPath::Fail(const absl::Status& status, const Pass& pass) {
  if (status.ok()) return;
  parts_.errors.Fail(
      Annotate(status, absl::StrCat("step ", pass.step, " micro-step ", pass.micro_step)));
}

// ---------------------------------------------------------------- the thread

void GradientPath::Run() {
  while (true) {
    std::function<void()> work;
    {
      MutexLock lock(mutex_);
      while (given_.empty() && !stopped_) changed_.Wait(mutex_);
      // What is still in the queue is dropped: nobody waits for it after Stop.
      if (stopped_) break;
      // It stays in the queue until it is done, because WaitGiven waits for that.
      work = given_.front();
    }
    work();
    MutexLock lock(mutex_);
    given_.pop_front();
    changed_.NotifyAll();
  }
  MutexLock lock(mutex_);
  left_ = true;
  changed_.NotifyAll();
}

absl::Status GradientPath::Communicate(const Pass& pass) {
  // Before the last micro-step of a sum there is nothing to reduce. Its end is reported all the
  // same, with the parameters that it used.
  if (!pass.sums_here || pass.last()) {
    for (const int bucket : parts_.buckets.order().reduction) {
      BALLAST_RETURN_IF_ERROR(parts_.buckets.WaitReady(parts_.communicate, bucket));
      BALLAST_RETURN_IF_ERROR(
          Annotate(ReduceAndSend(bucket, pass), absl::StrCat("bucket ", bucket)));
    }
  }
  std::optional<UsedParameters> used = WaitForPassEnd();
  if (!used.has_value()) return absl::OkStatus();
  used->non_finite = parts_.reduction.TakeNonFinite();
  LogNonFinite(parts_.job.layout, options_.rank, pass.step, pass.micro_step, used->non_finite);
  // In the sender's queue this comes after the micro-step's pushes, as GradientSink requires.
  sender_->EndMicroStep(pass.step, pass.micro_step, *std::move(used));
  return absl::OkStatus();
}

absl::Status GradientPath::ReduceAndSend(int bucket, const Pass& pass) {
  const float* gradient = nullptr;
  BALLAST_RETURN_IF_ERROR(parts_.trace.Around(
      parts_.communicate, Track::kReduce,
      {.step = pass.step, .micro_step = static_cast<int>(pass.micro_step), .bucket = bucket},
      [&]() -> absl::Status {
        BALLAST_ASSIGN_OR_RETURN(gradient, Reduce(bucket, pass));
        return absl::OkStatus();
      }));
  return gradient == nullptr ? absl::OkStatus() : SendGradient(bucket, pass, gradient);
}

absl::StatusOr<const float*> GradientPath::Reduce(int bucket, const Pass& pass) {
  parts_.buckets.StartReducing(bucket);
  BALLAST_ASSIGN_OR_RETURN(const float* gradient, parts_.reduction.Reduce(bucket, pass.step));
  // If nothing is sent, the bucket is free at once.
  if (shards_[bucket].elements > 0 && parts_.errors.current().ok()) return gradient;
  BALLAST_RETURN_IF_ERROR(parts_.buckets.Release(parts_.communicate, bucket));
  return nullptr;
}

absl::Status GradientPath::SendGradient(int bucket, const Pass& pass, const float* gradient) {
  if (options_.on_device) {
    BALLAST_RETURN_IF_ERROR(RoundToPlaces(bucket, pass, gradient));
    return parts_.buckets.Release(parts_.communicate, bucket);
  }
  const WireBuffer& wire = wire_[std::exchange(next_wire_, (next_wire_ + 1) % wire_.size())];
  BALLAST_RETURN_IF_ERROR(parts_.communicate.Wait(*wire.copied_out));
  BALLAST_RETURN_IF_ERROR(
      parts_.reduction.Round(bucket, shards_[bucket].elements, gradient, wire.memory->data()));
  // The next micro-step may write the bucket while the wire buffer is copied.
  BALLAST_RETURN_IF_ERROR(parts_.buckets.Release(parts_.communicate, bucket));
  return CopyOut(bucket, pass, wire);
}

absl::Status GradientPath::CopyOut(int bucket, const Pass& pass, const WireBuffer& wire) {
  // `released` was recorded after the rounding, so it also says that the wire buffer is filled.
  BALLAST_RETURN_IF_ERROR(parts_.copy_out.Wait(parts_.buckets.released(bucket)));
  const size_t size =
      SizeBytes(parts_.job.spec.groups[parts_.job.buckets[bucket].group].wire_dtype);
  BALLAST_RETURN_IF_ERROR(GiveRows(
      bucket, pass, parts_.copy_out, [&](int64_t begin, int chunk, absl::Span<std::byte> to) {
        return parts_.trace.Around(
            parts_.copy_out, Track::kCopy,
            {.step = pass.step,
             .micro_step = static_cast<int>(pass.micro_step),
             .bucket = bucket,
             .chunk = chunk},
            [&] { return parts_.copy_out.CopyToHost(to, wire.memory->data() + begin * size); });
      }));
  // After an error too: the next user of the wire buffer waits for this event.
  return parts_.copy_out.Record(*wire.copied_out);
}

absl::Status GradientPath::RoundToPlaces(int bucket, const Pass& pass, const float* gradient) {
  const size_t size =
      SizeBytes(parts_.job.spec.groups[parts_.job.buckets[bucket].group].wire_dtype);
  return GiveRows(bucket, pass, parts_.communicate,
                  [&](int64_t begin, int, absl::Span<std::byte> to) {
                    return parts_.reduction.Round(bucket, static_cast<int64_t>(to.size() / size),
                                                  gradient + begin, to.data());
                  });
}

absl::Status GradientPath::GiveRows(
    int bucket, const Pass& pass, DeviceStream& stream,
    absl::FunctionRef<absl::Status(int64_t, int, absl::Span<std::byte>)> give) {
  std::vector<client::GradientPush> pushes;  // Whose work was given, or is in `row`.
  absl::Span<std::byte> row;
  int64_t row_begin = 0;
  int row_chunk = -1;
  int64_t begin = 0;
  const auto end_row = [&]() -> absl::Status {
    if (row.empty()) return absl::OkStatus();
    return give(row_begin, row_chunk, std::exchange(row, {}));
  };
  const auto push = [&]() -> absl::Status {
    BALLAST_RETURN_IF_ERROR(end_row());
    return sender_->Push(stream, pass.step, std::exchange(pushes, {}));
  };
  // If all are free together, the bucket is one push, and so has one event.
  const bool all_free = places_->AwaitFree(shards_[bucket].chunks);
  pushes.reserve(shards_[bucket].chunks.size());
  for (const int chunk : shards_[bucket].chunks) {
    // What a place is waited for may be among what is not pushed yet.
    if (!all_free && !places_->IsFree(chunk)) BALLAST_RETURN_IF_ERROR(push());
    std::optional<GradientSlots::Place> place = TakePlace(chunk, pass);
    // What was given before is pushed all the same: the sender releases it when its copies are
    // done.
    if (!place.has_value()) break;
    if (!row.empty() && row.end() == place->bytes.begin()) {
      row = {row.data(), row.size() + place->bytes.size()};
      row_chunk = -1;
    } else {
      BALLAST_RETURN_IF_ERROR(end_row());
      row = place->bytes;
      row_begin = begin;
      row_chunk = chunk;
    }
    // Chunks tile the shard in order, so this is also the place in the wire buffer.
    begin += parts_.job.layout.chunks()[chunk].elements;
    pushes.push_back({.chunk = chunk,
                      .micro_step_begin = pass.sums_here ? 0 : pass.micro_step,
                      .micro_step_end = pass.micro_step + 1,
                      .final = pass.last(),
                      .empty = false,
                      .payload = place->bytes,
                      .released = std::move(place->released)});
  }
  return push();
}

// Empty: the optimizer does not take what it has, which ends the step.
std::optional<GradientSlots::Place> GradientPath::TakePlace(int chunk, const Pass& pass) {
  absl::StatusOr<GradientSlots::Place> place = places_->Take(chunk, pass.micro_step);
  if (place.ok()) return *std::move(place);
  parts_.errors.FailStep(Annotate(place.status(), absl::StrCat("step ", pass.step)));
  return std::nullopt;
}

std::optional<UsedParameters> GradientPath::WaitForPassEnd() {
  MutexLock lock(mutex_);
  while (used_.empty() && !stopped_) changed_.Wait(mutex_);
  if (used_.empty()) return std::nullopt;
  std::optional<UsedParameters> used = std::move(used_.front());
  used_.pop_front();
  return used;
}

}  // namespace ballast::worker
