#include "gpu_worker/buckets/bucket_reducer.h"

#include <algorithm>
#include <utility>

#include "cpu_optimizer_service/common/check.h"
#include "cpu_optimizer_service/common/status.h"
#include "gpu_worker/base/stopwatch.h"

namespace ballast::worker {

BucketReducer::BucketReducer(const Layout& layout, absl::Span<const Bucket> buckets,
                             absl::Span<const int> backward_order,
                             std::vector<absl::Span<float>> gradients, Collective& collective,
                             Consumer consumer, ReducerOptions options)
    : layout_(layout),
      buckets_(buckets),
      gradients_(std::move(gradients)),
      consumer_(std::move(consumer)),
      options_(std::move(options)),
      collective_(collective),
      order_(MakeBucketOrder(layout, buckets, backward_order)),
      parameters_(layout.spec().parameters.size()),
      next_(buckets.size()) {
  int64_t largest_shard = 0;
  for (size_t b = 0; b < buckets.size(); ++b) {
    states_.emplace_back(order_.parameters_of_bucket[b].size());
    largest_shard = std::max(largest_shard, buckets[b].shard_elements);
  }
  shard_.resize(largest_shard);
  // Last: it uses all of the above. It has nothing to do yet, because `next_` is at the end.
  thread_ = std::thread([this] { Run(); });
}

BucketReducer::~BucketReducer() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    changed_.NotifyAll();
  }
  // First a bucket in progress ends: a collective has a timeout, but cannot be left.
  thread_.join();
}

void BucketReducer::StartMicroStep(uint32_t micro_step, uint32_t micro_steps) {
  MutexLock lock(mutex_);
  // FinishMicroStep returns the error. The thread has ended.
  if (!status_.ok()) return;
  Check(next_ == order_.reduction.size(), "the last micro-step is finished before the next starts");
  // Allocated by the first step that has something to sum: the number of micro-steps may vary.
  if (sums_here(micro_steps) && accumulators_.empty()) {
    for (const absl::Span<float> space : gradients_) accumulators_.emplace_back(space.size(), 0.0f);
  }
  for (Parameter& parameter : parameters_) {
    parameter.completed = false;
    parameter.reached = false;
    if (micro_step == 0) parameter.first_reached.reset();
  }
  non_finite_.reset();
  // Where the service sums, each micro-step is a reduction of its own.
  for (GradientBucket& bucket : states_) {
    if (sums_here(micro_steps)) {
      bucket.StartFilling(micro_step, micro_steps);
    } else {
      bucket.StartFilling(0, 1);
    }
  }
  micro_step_ = {.index = micro_step, .of = micro_steps};
  next_ = 0;
  changed_.NotifyAll();
}

void BucketReducer::GradientReady(int parameter) {
  MutexLock lock(mutex_);
  if (!status_.ok()) return;
  parameters_[parameter].reached = true;
  if (!parameters_[parameter].first_reached.has_value())
    parameters_[parameter].first_reached = micro_step_.index;
  Complete(parameter);
}

void BucketReducer::Complete(int parameter) {
  Check(!parameters_[parameter].completed,
        "a parameter's gradient is complete once in a micro-step");
  parameters_[parameter].completed = true;
  for (const int bucket : order_.buckets_of_parameter[parameter]) states_[bucket].CompleteOne();
  changed_.NotifyAll();
}

// The memory may still have the gradient of an earlier micro-step.
void BucketReducer::ZeroUnused(int parameter) {
  const ParameterPlace& place = layout_.place(parameter);
  const absl::Span<float> space = gradients_[layout_.spec().parameters[parameter].group];
  std::fill_n(space.begin() + place.offset, place.elements, 0.0f);
}

absl::StatusOr<ReducedMicroStep> BucketReducer::FinishMicroStep() {
  ReducedMicroStep result;
  MutexLock lock(mutex_);
  if (!status_.ok()) return status_;
  for (size_t p = 0; p < parameters_.size(); ++p) {
    if (layout_.place(p).offset < 0) continue;  // Frozen.
    if (parameters_[p].completed) {
      result.used_parameters.push_back(p);
      continue;
    }
    // Its buckets are filling until Complete, so no thread reads them yet. An accumulator takes
    // nothing from it.
    result.all_used = false;
    if (!sums_here(micro_step_.of)) ZeroUnused(p);
    Complete(p);
  }
  const Work before = work_;
  Stopwatch waiting;
  while (status_.ok() && next_ < order_.reduction.size()) changed_.Wait(mutex_);
  if (!status_.ok()) return status_;
  result.non_finite = non_finite_;
  // The wait was for the reducer's thread, so it is divided by what that did meanwhile.
  const double waited = waiting.Lap();
  const double reducing = work_.reduce_seconds - before.reduce_seconds;
  const double consuming = work_.consume_seconds - before.consume_seconds;
  if (reducing + consuming > 0) {
    result.reduce_seconds = waited * reducing / (reducing + consuming);
    result.consume_seconds = waited - result.reduce_seconds;
  }
  return result;
}

// ---------------------------------------------------------------- the communication thread

void BucketReducer::Run() {
  while (true) {
    int bucket;
    MicroStep micro_step;
    {
      MutexLock lock(mutex_);
      while (!stopping_ && (next_ == order_.reduction.size() ||
                            states_[order_.reduction[next_]].state() != BucketState::kReady)) {
        changed_.Wait(mutex_);
      }
      if (stopping_) return;
      bucket = order_.reduction[next_];
      micro_step = micro_step_;
    }
    const absl::Status status = Process(bucket, micro_step);
    MutexLock lock(mutex_);
    if (!status.ok()) {
      status_ = status;
      changed_.NotifyAll();
      return;
    }
    // Only when the bucket's work is done: at the end FinishMicroStep returns, and backward may
    // write to all buckets again.
    ++next_;
    changed_.NotifyAll();
  }
}

absl::Status BucketReducer::Process(int bucket, const MicroStep& micro_step) {
  if (sums_here(micro_step.of)) {
    Accumulate(bucket, micro_step);
    if (!micro_step.last()) return absl::OkStatus();
  }
  BALLAST_RETURN_IF_ERROR(Reduce(bucket, micro_step));
  MutexLock lock(mutex_);
  states_[bucket].Release();
  return absl::OkStatus();
}

// A micro-step adds nothing for a parameter that its backward did not reach; one that no micro-step
// reached ends as the zeros of the first.
std::vector<BucketReducer::Addend> BucketReducer::Addends(int index,
                                                          const MicroStep& micro_step) const {
  const Bucket& bucket = buckets_[index];
  std::vector<Addend> addends;
  for (const int p : order_.parameters_of_bucket[index]) {
    const ParameterPlace& place = layout_.place(p);
    Addend addend{.what = Addend::kAdd,
                  .begin = std::max(place.offset, bucket.begin),
                  .end = std::min(place.offset + place.elements, bucket.end)};
    if (parameters_[p].reached) {
      // The first gradient is not added to zeros, which would turn -0 into +0.
      if (parameters_[p].first_reached == micro_step.index) addend.what = Addend::kAssign;
      addends.push_back(addend);
    } else if (micro_step.index == 0) {
      addend.what = Addend::kZero;
      addends.push_back(addend);
    }
  }
  return addends;
}

void BucketReducer::Accumulate(int index, const MicroStep& micro_step) {
  std::vector<Addend> addends;
  {
    MutexLock lock(mutex_);
    states_[index].StartAccumulating();
    addends = Addends(index, micro_step);
  }
  // Without the lock: in this state no other thread uses the bucket, and backward can report other
  // parameters meanwhile.
  const float* gradient = gradients_[buckets_[index].group].data();
  float* sum = accumulators_[buckets_[index].group].data();
  for (const Addend& addend : addends) {
    switch (addend.what) {
      case Addend::kZero:
        std::fill(sum + addend.begin, sum + addend.end, 0.0f);
        break;
      case Addend::kAssign:
        std::copy(gradient + addend.begin, gradient + addend.end, sum + addend.begin);
        break;
      case Addend::kAdd:
        for (int64_t i = addend.begin; i < addend.end; ++i) sum[i] += gradient[i];
        break;
    }
  }
  MutexLock lock(mutex_);
  states_[index].FinishAccumulating();
}

absl::Status BucketReducer::Reduce(int index, const MicroStep& micro_step) {
  const Bucket& bucket = buckets_[index];
  const int64_t elements = bucket.shard_elements * collective_.world_size();
  bool accumulated;
  {
    MutexLock lock(mutex_);
    states_[index].Seal();
    accumulated = states_[index].accumulates();
  }
  // From here to the release no thread writes to it.
  const absl::Span<const float> sealed =
      (accumulated ? absl::MakeConstSpan(accumulators_[bucket.group])
                   : absl::Span<const float>(gradients_[bucket.group]))
          .subspan(bucket.begin, elements);
  // Before the reduction: a sum over ranks does not show which rank has the element.
  if (!options_.checked_as.empty()) FindNonFinite(index, sealed);
  {
    MutexLock lock(mutex_);
    states_[index].StartReducing();
  }
  const absl::Span<float> shard = absl::MakeSpan(shard_).subspan(0, bucket.shard_elements);
  Stopwatch stopwatch;
  BALLAST_RETURN_IF_ERROR(collective_.ReduceScatterSum(sealed, shard));
  const double reduce_seconds = stopwatch.Lap();
  if (options_.on_reduced) options_.on_reduced(index, reduce_seconds);
  {
    MutexLock lock(mutex_);
    states_[index].FinishReducing();
    work_.reduce_seconds += reduce_seconds;
  }
  const int64_t begin = bucket.begin + collective_.rank() * bucket.shard_elements;
  const int64_t owned = std::clamp<int64_t>(bucket.end - begin, 0, bucket.shard_elements);
  // Without the lock: the consumer may wait for the optimizer, and backward must go on.
  consumer_({.bucket = index,
             .micro_step_begin = accumulated ? 0 : micro_step.index,
             .micro_step_end = micro_step.index + 1,
             .final = micro_step.last(),
             .values = shard.subspan(0, owned)});
  const double consume_seconds = stopwatch.Lap();
  MutexLock lock(mutex_);
  work_.consume_seconds += consume_seconds;
  return absl::OkStatus();
}

void BucketReducer::FindNonFinite(int index, absl::Span<const float> sealed) {
  const Bucket& bucket = buckets_[index];
  for (const int p : order_.parameters_of_bucket[index]) {
    const ParameterPlace& place = layout_.place(p);
    const int64_t begin = std::max(place.offset, bucket.begin);
    const int64_t end = std::min(place.offset + place.elements, bucket.end);
    const std::optional<NonFiniteElement> found = FirstNonFinite(
        sealed.subspan(begin - bucket.begin, end - begin), options_.checked_as[bucket.group]);
    if (!found.has_value()) continue;
    const int64_t element = begin - place.offset + found->index;
    MutexLock lock(mutex_);
    if (ComesFirst(p, element, non_finite_)) {
      non_finite_ = {.parameter = p, .element = element, .value = found->value};
    }
    return;  // The bucket's parameters are in order.
  }
}

}  // namespace ballast::worker
