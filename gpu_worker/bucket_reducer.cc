#include "gpu_worker/bucket_reducer.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "cpu_optimizer_service/common/status.h"
#include "gpu_worker/check.h"
#include "gpu_worker/stopwatch.h"

namespace ballast::worker {

BucketReducer::BucketReducer(const Layout& layout, absl::Span<const Bucket> buckets,
                             absl::Span<const int> backward_order,
                             std::vector<absl::Span<float>> gradients, Collective& collective,
                             Consumer consumer)
    : layout_(layout),
      buckets_(buckets),
      gradients_(std::move(gradients)),
      consumer_(std::move(consumer)),
      collective_(collective),
      buckets_of_parameter_(layout.spec().parameters.size()),
      order_(buckets.size()),
      completed_(layout.spec().parameters.size(), true),
      next_(buckets.size()) {
  std::vector<int> completes_at(layout.spec().parameters.size(), 0);
  for (size_t i = 0; i < backward_order.size(); ++i) completes_at[backward_order[i]] = i;

  // A bucket is complete when the last of its parameters is.
  std::vector<int> bucket_completes_at(buckets.size(), 0);
  int64_t largest_shard = 0;
  for (size_t b = 0; b < buckets.size(); ++b) {
    int parameters = 0;
    for (size_t p = 0; p < buckets_of_parameter_.size(); ++p) {
      const ParameterPlace& place = layout.place(p);
      if (layout.spec().parameters[p].group != buckets[b].group || place.elements == 0 ||
          place.offset < 0 || place.offset >= buckets[b].end ||
          place.offset + place.elements <= buckets[b].begin) {
        continue;
      }
      ++parameters;
      buckets_of_parameter_[p].push_back(b);
      bucket_completes_at[b] = std::max(bucket_completes_at[b], completes_at[p]);
    }
    states_.emplace_back(parameters);
    largest_shard = std::max(largest_shard, buckets[b].shard_elements);
  }
  std::iota(order_.begin(), order_.end(), 0);
  std::stable_sort(order_.begin(), order_.end(),
                   [&](int a, int b) { return bucket_completes_at[a] < bucket_completes_at[b]; });
  shard_.resize(largest_shard);
  thread_ = std::thread([this] { Run(); });
}

BucketReducer::~BucketReducer() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    changed_.NotifyAll();
  }
  thread_.join();
}

void BucketReducer::StartMicroStep(uint32_t micro_step) {
  MutexLock lock(mutex_);
  if (!status_.ok()) return;
  Check(next_ == order_.size(), "the last micro-step is finished before the next starts");
  completed_.assign(completed_.size(), false);
  for (GradientBucket& bucket : states_) bucket.StartFilling();
  micro_step_ = micro_step;
  next_ = 0;
  changed_.NotifyAll();
}

void BucketReducer::GradientReady(int parameter) {
  MutexLock lock(mutex_);
  if (status_.ok()) Complete(parameter);
}

void BucketReducer::Complete(int parameter) {
  Check(!completed_[parameter], "a parameter's gradient is complete once in a micro-step");
  completed_[parameter] = true;
  for (const int bucket : buckets_of_parameter_[parameter]) states_[bucket].CompleteOne();
  changed_.NotifyAll();
}

void BucketReducer::ZeroUnused(int parameter) {
  const ParameterPlace& place = layout_.place(parameter);
  const absl::Span<float> space = gradients_[layout_.spec().parameters[parameter].group];
  std::fill_n(space.begin() + place.offset, place.elements, 0.0f);
}

absl::StatusOr<ReducedMicroStep> BucketReducer::FinishMicroStep() {
  ReducedMicroStep result;
  MutexLock lock(mutex_);
  if (!status_.ok()) return status_;
  for (size_t p = 0; p < completed_.size(); ++p) {
    if (layout_.place(p).offset < 0) continue;  // Frozen.
    if (completed_[p]) {
      result.used_parameters.push_back(p);
      continue;
    }
    // Its buckets are filling until Complete, so nobody reads them yet.
    result.all_used = false;
    ZeroUnused(p);
    Complete(p);
  }
  const Work before = work_;
  Stopwatch waiting;
  while (status_.ok() && next_ < order_.size()) changed_.Wait(mutex_);
  if (!status_.ok()) return status_;
  const double waited = waiting.Lap();
  const double reducing = work_.reduce_seconds - before.reduce_seconds;
  const double consuming = work_.consume_seconds - before.consume_seconds;
  if (reducing + consuming > 0) {
    result.reduce_seconds = waited * reducing / (reducing + consuming);
    result.consume_seconds = waited - result.reduce_seconds;
  }
  return result;
}

// The communication thread.
void BucketReducer::Run() {
  while (true) {
    int bucket;
    uint32_t micro_step;
    {
      MutexLock lock(mutex_);
      while (!stopping_ &&
             (next_ == order_.size() || states_[order_[next_]].state() != BucketState::kReady)) {
        changed_.Wait(mutex_);
      }
      if (stopping_) return;
      bucket = order_[next_];
      micro_step = micro_step_;
      states_[bucket].StartReducing();
    }
    const absl::Status status = Reduce(bucket, micro_step);
    MutexLock lock(mutex_);
    if (!status.ok()) {
      status_ = status;
      changed_.NotifyAll();
      return;
    }
    states_[bucket].Release();
    ++next_;
    changed_.NotifyAll();
  }
}

absl::Status BucketReducer::Reduce(int index, uint32_t micro_step) {
  const Bucket& bucket = buckets_[index];
  const int64_t elements = bucket.shard_elements * collective_.world_size();
  const absl::Span<float> shard = absl::MakeSpan(shard_).subspan(0, bucket.shard_elements);
  Stopwatch stopwatch;
  BALLAST_RETURN_IF_ERROR(collective_.ReduceScatterSum(
      gradients_[bucket.group].subspan(bucket.begin, elements), shard));
  const double reduce_seconds = stopwatch.Lap();
  {
    MutexLock lock(mutex_);
    states_[index].FinishReducing();
    work_.reduce_seconds += reduce_seconds;
  }
  const int64_t begin = bucket.begin + collective_.rank() * bucket.shard_elements;
  const int64_t owned = std::clamp<int64_t>(bucket.end - begin, 0, bucket.shard_elements);
  BALLAST_RETURN_IF_ERROR(consumer_(index, micro_step, shard.subspan(0, owned)));
  const double consume_seconds = stopwatch.Lap();
  MutexLock lock(mutex_);
  work_.consume_seconds += consume_seconds;
  return absl::OkStatus();
}

}  // namespace ballast::worker
