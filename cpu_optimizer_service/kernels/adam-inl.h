// The recurrence of common/adam.h, a vector at a time. Included once per instruction set.
#if defined(BALLAST_CPU_OPTIMIZER_SERVICE_ADAM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BALLAST_CPU_OPTIMIZER_SERVICE_ADAM_INL_H_
#undef BALLAST_CPU_OPTIMIZER_SERVICE_ADAM_INL_H_
#else
#define BALLAST_CPU_OPTIMIZER_SERVICE_ADAM_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cpu_optimizer_service/common/adam.h"
#include "cpu_optimizer_service/common/check.h"
#include "cpu_optimizer_service/common/dtype.h"
#include "cpu_optimizer_service/kernels/conversion-inl.h"
#include "cpu_optimizer_service/kernels/redo_lane.h"
#include "hwy/cache_control.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ballast {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using FloatTag = hn::ScalableTag<float>;
using FloatVec = hn::Vec<FloatTag>;

// Z and P of the formula, for the mode in which UpdateAdam runs: denormals are flushed, to a zero
// of either sign. Adding zero makes a flushed operand, and a negative zero, +0; only the least
// normal number is then left for P to find.
HWY_INLINE FloatVec Z(FloatVec x) { return hn::Add(x, hn::Zero(FloatTag())); }

HWY_INLINE FloatVec P(FloatVec x) {
  return hn::IfThenZeroElse(hn::Le(hn::Abs(x), hn::Set(FloatTag(), 0x1p-126f)), x);
}

// P and Z cost as much as all the rest of the formula, and hardly ever show: only where a product
// is 2^-126 exactly, or a sum is denormal or zero. So a turn is first computed without them,
// quickly, while each sum s = a + b of the formula is looked at. Where |a| or |s| is at least
// 2^-95, s is what it would be with them: an operand of 2^-126 is less than half an ulp of the
// other one, and s is a multiple of 2^-119, so never denormal, nor -0. Infinity and NaN pass, and
// stay what they are. Where some sum is not so large, the turn is computed again, carefully, and
// the next ones too.
//
// Not looked at is P(m / d), which is left out in both ways except for step sizes above 1.
constexpr size_t kCarefulElements = 8192;

using LargeMask = hn::Mask<hn::RebindToSigned<FloatTag>>;

HWY_INLINE LargeMask IsLarge(FloatVec a, FloatVec sum) {
  const hn::RebindToSigned<FloatTag> di;
  // An exponent field of 32 or more has one of its three upper bits.
  const auto bits = hn::Or(hn::BitCast(di, a), hn::BitCast(di, sum));
  return hn::Ne(hn::And(bits, hn::Set(di, 0x70000000)), hn::Zero(di));
}

// Z(a + P(b)), of which the quick way takes note in `large`.
template <bool kCareful>
HWY_INLINE FloatVec AddProduct(FloatVec a, FloatVec b, LargeMask& large) {
  if constexpr (kCareful) {
    return Z(hn::Add(a, P(b)));
  } else {
    const FloatVec sum = hn::Add(a, b);
    large = hn::And(large, IsLarge(a, sum));
    return sum;
  }
}

template <bool kCareful>
HWY_INLINE FloatVec PIf(FloatVec x) {
  return kCareful ? P(x) : x;
}

// The new values of one vector from `index` of each array.
//
// Where the formula's Z or P is left out even of the careful way, it could not be seen:
//   Z of what is read       flushed when used, and its sign ends in a P or in the Z of a sum
//   P(g * multiplier)       without L2 decay: what 2^-126 becomes times 1 - beta1 <= 1, P makes
//                           zero, and as 1 - beta2 is zero or normal, so it does below
//   P(one_minus_beta2 * g)  2^-126 or less means |g| <= 1, so the product with g is 2^-126 or less
//   P(m / d)                what 2^-126 becomes times a step size of at most 1, P makes zero
template <WeightDecay kDecay, bool kAmsgrad, DType kGradient, bool kCareful>
HWY_INLINE void ComputeVector(const AdamRun& run, const AdamScalars& s, size_t index, FloatVec& w,
                              FloatVec& m, FloatVec& v, LargeMask& large) {
  const FloatTag d;
  FloatVec g = hn::Mul(LoadAs<kGradient>(d, run.gradient, index), hn::Set(d, s.multiplier));

  w = hn::LoadU(d, run.master + index);
  if constexpr (kDecay == WeightDecay::kL2) {
    const FloatVec decay = hn::Mul(hn::Set(d, s.weight_decay), w);
    g = AddProduct<kCareful>(PIf<kCareful>(g), decay, large);
  }
  if constexpr (kDecay == WeightDecay::kDecoupled) {
    w = PIf<kCareful>(hn::Mul(w, hn::Set(d, s.decay)));
  }

  const FloatVec old_m = hn::LoadU(d, run.exp_avg + index);
  const FloatVec old_v = hn::LoadU(d, run.exp_avg_sq + index);
  m = AddProduct<kCareful>(PIf<kCareful>(hn::Mul(hn::Set(d, s.beta1), old_m)),
                           hn::Mul(hn::Set(d, s.one_minus_beta1), g), large);
  v = AddProduct<kCareful>(PIf<kCareful>(hn::Mul(hn::Set(d, s.beta2), old_v)),
                           hn::Mul(hn::Mul(hn::Set(d, s.one_minus_beta2), g), g), large);

  FloatVec used_v = v;
  if constexpr (kAmsgrad) {
    const FloatVec vm = Z(hn::LoadU(d, run.max_exp_avg_sq + index));
    used_v = hn::IfThenElse(hn::Or(hn::Lt(v, vm), hn::IsNaN(vm)), vm, v);
  }
  const FloatVec denominator = hn::Add(
      hn::Mul(hn::Sqrt(used_v), hn::Set(d, s.inverse_sqrt_bias_correction2)), hn::Set(d, s.eps));
  FloatVec quotient = hn::Div(m, denominator);
  if (kCareful && s.step_size > 1) quotient = P(quotient);
  w = AddProduct<kCareful>(w, hn::Mul(hn::Set(d, -s.step_size), quotient), large);
}

// What amsgrad stores, from what was read and what v has become.
HWY_INLINE FloatVec MaxOf(const AdamRun& run, size_t index, FloatVec v) {
  const FloatTag d;
  const FloatVec vm = Z(hn::LoadU(d, run.max_exp_avg_sq + index));
  return hn::IfThenElse(hn::Or(hn::Lt(v, vm), hn::IsNaN(vm)), vm, v);
}

HWY_INLINE void StoreMax(const AdamRun& run, size_t index, FloatVec v) {
  const FloatTag d;
  hn::StoreU(MaxOf(run, index, v), d, run.new_max_exp_avg_sq + index);
}

// The new values of one turn of two vectors, for a process that finishes it.
template <bool kAmsgrad>
HWY_INLINE void RecordTurn(const AdamRun& run, size_t index, RedoWriter& redo, FloatVec w0,
                           FloatVec w1, FloatVec m0, FloatVec m1, FloatVec v0, FloatVec v1) {
  const FloatTag d;
  const size_t lanes = hn::Lanes(d);
  RedoTurn& turn = redo.next();
  hn::StoreU(w0, d, turn.plane(0));
  hn::StoreU(w1, d, turn.plane(0) + lanes);
  hn::StoreU(m0, d, turn.plane(1));
  hn::StoreU(m1, d, turn.plane(1) + lanes);
  hn::StoreU(v0, d, turn.plane(2));
  hn::StoreU(v1, d, turn.plane(2) + lanes);
  if constexpr (kAmsgrad) {
    hn::StoreU(MaxOf(run, index, v0), d, turn.plane(3));
    hn::StoreU(MaxOf(run, index + lanes, v1), d, turn.plane(3) + lanes);
  }
  redo.Record(static_cast<int64_t>(2 * lanes));
}

// One turn from `index`. False, and nothing is stored, if the quick way does not do. `redo` is
// nullable.
template <WeightDecay kDecay, bool kAmsgrad, DType kGradient, bool kHasShard, DType kShard,
          bool kCareful>
HWY_INLINE bool UpdateTurn(const AdamRun& r, size_t index, bool stream, RedoWriter* redo) {
  const FloatTag d;
  const size_t next = index + hn::Lanes(d);
  LargeMask large = hn::FirstN(hn::RebindToSigned<FloatTag>(), hn::Lanes(d));
  FloatVec w0, m0, v0, w1, m1, v1;
  ComputeVector<kDecay, kAmsgrad, kGradient, kCareful>(r, r.scalars, index, w0, m0, v0, large);
  ComputeVector<kDecay, kAmsgrad, kGradient, kCareful>(r, r.scalars, next, w1, m1, v1, large);
  if (!kCareful && !hn::AllTrue(hn::RebindToSigned<FloatTag>(), large)) return false;
  if (redo != nullptr) RecordTurn<kAmsgrad>(r, index, *redo, w0, w1, m0, m1, v0, v1);
  if constexpr (kAmsgrad) {
    StoreMax(r, index, v0);
    StoreMax(r, next, v1);
  }
  hn::StoreU(m0, d, r.new_exp_avg + index);
  hn::StoreU(m1, d, r.new_exp_avg + next);
  hn::StoreU(v0, d, r.new_exp_avg_sq + index);
  hn::StoreU(v1, d, r.new_exp_avg_sq + next);
  hn::StoreU(w0, d, r.new_master + index);
  hn::StoreU(w1, d, r.new_master + next);
  if constexpr (kHasShard) StorePairAs<kShard>(d, w0, w1, r.shard, index, stream);
  return true;
}

// Asks for the cache lines of elements [index, index + elements) of all sources.
template <bool kAmsgrad, DType kGradient>
HWY_INLINE void PrefetchSources(const AdamRun& run, size_t index, size_t elements) {
  constexpr size_t kLineBytes = 64;
  const char* gradient = static_cast<const char*>(run.gradient) + index * SizeBytes(kGradient);
  for (size_t byte = 0; byte < elements * SizeBytes(kGradient); byte += kLineBytes) {
    hwy::Prefetch(gradient + byte);
  }
  constexpr size_t kLineElements = kLineBytes / sizeof(float);
  for (size_t i = index; i < index + elements; i += kLineElements) {
    hwy::Prefetch(run.master + i);
    hwy::Prefetch(run.exp_avg + i);
    hwy::Prefetch(run.exp_avg_sq + i);
    if constexpr (kAmsgrad) hwy::Prefetch(run.max_exp_avg_sq + i);
  }
}

// Elements that one turn of the loop updates: a whole vector of 16-bit elements.
HWY_INLINE size_t TurnElements() { return 2 * hn::Lanes(FloatTag()); }

// A whole number of turns. A streamed shard is aligned to a vector. Whether to stream is asked in each turn: a
// loop of its own for it would nearly double what is compiled, and is no faster.
template <WeightDecay kDecay, bool kAmsgrad, DType kGradient, bool kHasShard, DType kShard>
HWY_NOINLINE void UpdateTurns(const AdamRun& run, bool stream, RedoWriter* redo) {
  constexpr size_t kPrefetchAhead = 512;
  constexpr size_t kPrefetchElements = 32;  // The elements in a line of 16-bit gradients.
  const AdamRun r = run;                    // A copy that no store can change.
  const auto elements = static_cast<size_t>(r.elements);
  const size_t turn = TurnElements();
  const size_t prefetch = std::max(turn, kPrefetchElements);
  const auto update = [&r, stream, redo]<bool kCareful>(size_t index,
                                                        std::bool_constant<kCareful>) HWY_ATTR {
    return UpdateTurn<kDecay, kAmsgrad, kGradient, kHasShard, kShard, kCareful>(r, index, stream,
                                                                                redo);
  };
  size_t careful_until = r.scalars.step_size > 1 ? elements : 0;
  for (size_t i = 0; i < elements; i += turn) {
    if (i >= careful_until && !update(i, std::false_type())) careful_until = i + kCarefulElements;
    if (i < careful_until) update(i, std::true_type());
    // After the turn, whose own loads would else wait behind what is not needed yet: 1.38 in place
    // of 1.19 Gparam/s on one thread.
    if (i % prefetch == 0) PrefetchSources<kAmsgrad, kGradient>(r, i + kPrefetchAhead, prefetch);
  }
}

// Less than a turn, in a padded copy, so that a tail needs no second version of the formula.
template <WeightDecay kDecay, bool kAmsgrad, DType kGradient, bool kHasShard, DType kShard>
HWY_NOINLINE void UpdatePadded(const AdamRun& run, RedoWriter* redo) {
  constexpr size_t kMaxTurn = 2 * hn::MaxLanes(FloatTag());
  const size_t elements = static_cast<size_t>(run.elements);
  const size_t bytes = elements * sizeof(float);
  float gradient[kMaxTurn] = {};
  float master[kMaxTurn] = {};
  float exp_avg[kMaxTurn] = {};
  float exp_avg_sq[kMaxTurn] = {};
  float max_exp_avg_sq[kMaxTurn] = {};
  float shard[kMaxTurn];
  std::memcpy(gradient, run.gradient, elements * SizeBytes(kGradient));
  std::memcpy(master, run.master, bytes);
  std::memcpy(exp_avg, run.exp_avg, bytes);
  std::memcpy(exp_avg_sq, run.exp_avg_sq, bytes);
  if constexpr (kAmsgrad) std::memcpy(max_exp_avg_sq, run.max_exp_avg_sq, bytes);

  AdamRun padded = run;
  padded.elements = static_cast<int64_t>(TurnElements());
  padded.gradient = gradient;
  padded.master = padded.new_master = master;
  padded.exp_avg = padded.new_exp_avg = exp_avg;
  padded.exp_avg_sq = padded.new_exp_avg_sq = exp_avg_sq;
  padded.max_exp_avg_sq = padded.new_max_exp_avg_sq = max_exp_avg_sq;
  padded.shard = shard;
  UpdateTurns<kDecay, kAmsgrad, kGradient, kHasShard, kShard>(padded, /*stream=*/false, nullptr);
  if (redo != nullptr) {
    RedoTurn& turn = redo->next();
    std::memcpy(turn.plane(0), master, bytes);
    std::memcpy(turn.plane(1), exp_avg, bytes);
    std::memcpy(turn.plane(2), exp_avg_sq, bytes);
    if constexpr (kAmsgrad) std::memcpy(turn.plane(3), max_exp_avg_sq, bytes);
    redo->Record(run.elements);
  }

  std::memcpy(run.new_master, master, bytes);
  std::memcpy(run.new_exp_avg, exp_avg, bytes);
  std::memcpy(run.new_exp_avg_sq, exp_avg_sq, bytes);
  if constexpr (kAmsgrad) std::memcpy(run.new_max_exp_avg_sq, max_exp_avg_sq, bytes);
  if constexpr (kHasShard) std::memcpy(run.shard, shard, elements * SizeBytes(kShard));
}

// Elements [begin, begin + elements) of `run`.
template <bool kAmsgrad, DType kGradient, bool kHasShard, DType kShard>
HWY_INLINE AdamRun Slice(AdamRun run, int64_t begin, int64_t elements) {
  run.elements = elements;
  run.gradient = static_cast<const char*>(run.gradient) + begin * SizeBytes(kGradient);
  run.master += begin;
  run.exp_avg += begin;
  run.exp_avg_sq += begin;
  run.new_master += begin;
  run.new_exp_avg += begin;
  run.new_exp_avg_sq += begin;
  if constexpr (kAmsgrad) run.max_exp_avg_sq += begin;
  if constexpr (kAmsgrad) run.new_max_exp_avg_sq += begin;
  if constexpr (kHasShard) run.shard = static_cast<char*>(run.shard) + begin * SizeBytes(kShard);
  return run;
}

// A padded head up to the first shard address that can be streamed to, whole turns, a padded tail.
template <WeightDecay kDecay, bool kAmsgrad, DType kGradient, bool kHasShard, DType kShard>
void UpdateRun(const AdamRun& run, RedoWriter* redo) {
  const int64_t turn = static_cast<int64_t>(TurnElements());
  if (redo != nullptr) Check(turn <= kUpdateTurnElements, "a turn's record holds a turn");
  const auto slice = Slice<kAmsgrad, kGradient, kHasShard, kShard>;
  int64_t head = 0;
  if constexpr (kHasShard) {
    const size_t vector_bytes = hn::Lanes(FloatTag()) * sizeof(float);
    const size_t past = reinterpret_cast<uintptr_t>(run.shard) % vector_bytes;
    if (past != 0) head = static_cast<int64_t>(vector_bytes - past) / SizeBytes(kShard);
    head = std::min(head, run.elements);
  }
  const int64_t whole = (run.elements - head) / turn * turn;
  const int64_t tail = run.elements - head - whole;
  if (head > 0) {
    UpdatePadded<kDecay, kAmsgrad, kGradient, kHasShard, kShard>(slice(run, 0, head), redo);
  }
  if (whole > 0) {
    const AdamRun turns = slice(run, head, whole);
    // Where the gradient was just read, the line is in the cache anyway.
    const bool stream = kHasShard && run.shard != run.gradient;
    UpdateTurns<kDecay, kAmsgrad, kGradient, kHasShard, kShard>(turns, stream, redo);
    // What was streamed becomes visible to a thread that learns of it by an ordinary store.
    if (stream) hwy::FlushStream();
  }
  if (tail > 0) {
    UpdatePadded<kDecay, kAmsgrad, kGradient, kHasShard, kShard>(slice(run, head + whole, tail),
                                                                 redo);
  }
}

// The options are chosen here, one after another, above every loop.
template <WeightDecay kDecay, bool kAmsgrad, DType kGradient>
void UpdateForShard(const AdamRun& run, RedoWriter* redo) {
  if (run.shard == nullptr) {
    return UpdateRun<kDecay, kAmsgrad, kGradient, false, DType::kFloat32>(run, redo);
  }
  switch (run.shard_dtype) {
    case DType::kBFloat16:
      return UpdateRun<kDecay, kAmsgrad, kGradient, true, DType::kBFloat16>(run, redo);
    case DType::kFloat16:
      return UpdateRun<kDecay, kAmsgrad, kGradient, true, DType::kFloat16>(run, redo);
    case DType::kFloat32:
      return UpdateRun<kDecay, kAmsgrad, kGradient, true, DType::kFloat32>(run, redo);
  }
}

template <WeightDecay kDecay, bool kAmsgrad>
void UpdateForGradient(const AdamRun& run, RedoWriter* redo) {
  switch (run.gradient_dtype) {
    case DType::kBFloat16:
      return UpdateForShard<kDecay, kAmsgrad, DType::kBFloat16>(run, redo);
    case DType::kFloat16:
      return UpdateForShard<kDecay, kAmsgrad, DType::kFloat16>(run, redo);
    case DType::kFloat32:
      return UpdateForShard<kDecay, kAmsgrad, DType::kFloat32>(run, redo);
  }
}

template <WeightDecay kDecay>
void UpdateForAmsgrad(const AdamRun& run, RedoWriter* redo) {
  if (run.max_exp_avg_sq != nullptr) return UpdateForGradient<kDecay, true>(run, redo);
  return UpdateForGradient<kDecay, false>(run, redo);
}

HWY_NOINLINE void UpdateForDecay(const AdamRun& run, RedoWriter* redo) {
  switch (run.scalars.weight_decay_kind) {
    case WeightDecay::kNone:
      return UpdateForAmsgrad<WeightDecay::kNone>(run, redo);
    case WeightDecay::kDecoupled:
      return UpdateForAmsgrad<WeightDecay::kDecoupled>(run, redo);
    case WeightDecay::kL2:
      return UpdateForAmsgrad<WeightDecay::kL2>(run, redo);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace ballast
HWY_AFTER_NAMESPACE();

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_ADAM_INL_H_
