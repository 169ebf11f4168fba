// The loop of an update, whatever its rule: a vector at a time, in turns of two. Included once per
// instruction set.
//
// A kernel is a type with
//   kPlanes                     how many planes it updates: the first ones of the run
//   Scalars                     of the formula
//   IsCareful(scalars)          whether the quick way never does
//   Compute<kCareful>(scalars, gradient, planes, large)
//                               the formula: new values of the planes, from theirs and the gradient;
//                               returns that of the shard
//   kHasSum                     only where its second plane is a sum that only grows
#if defined(BALLAST_CPU_OPTIMIZER_SERVICE_TURNS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BALLAST_CPU_OPTIMIZER_SERVICE_TURNS_INL_H_
#undef BALLAST_CPU_OPTIMIZER_SERVICE_TURNS_INL_H_
#else
#define BALLAST_CPU_OPTIMIZER_SERVICE_TURNS_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "cpu_optimizer_service/common/check.h"
#include "cpu_optimizer_service/common/dtype.h"
#include "cpu_optimizer_service/common/rule.h"
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

// Z and P of the formula, for the mode in which updates run: denormals are flushed, to a zero
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
// Not looked at is what is no operand of such a sum; there a kernel says why P could not be seen.
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

// Z(a + b), for a `b` that is no product.
template <bool kCareful>
HWY_INLINE FloatVec AddValue(FloatVec a, FloatVec b, LargeMask& large) {
  if constexpr (kCareful) {
    return Z(hn::Add(a, b));
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

// Z(w - P(step_size * P(numerator / denominator))). The inner P is left out unless the step size is
// above 1: what 2^-126 becomes times at most 1, the outer P makes zero. A kernel that calls this
// is careful for larger steps (IsCareful).
template <bool kCareful>
HWY_INLINE FloatVec StepByQuotient(FloatVec w, float step_size, FloatVec numerator,
                                   FloatVec denominator, LargeMask& large) {
  FloatVec quotient = hn::Div(numerator, denominator);
  if (kCareful && step_size > 1) quotient = P(quotient);
  return AddProduct<kCareful>(w, hn::Mul(hn::Set(FloatTag(), -step_size), quotient), large);
}

static_assert(kMaxPlanes * kUpdateTurnElements <= kSumTurnElements, "a turn's record holds all");

// The values of a kernel's planes for one vector.
template <class Kernel>
using PlaneVecs = FloatVec[Kernel::kPlanes];

// each(std::integral_constant) for 0 up to kCount: no loop, so that every vector stays in a register.
template <class Each, size_t... kPlace>
HWY_INLINE void ForEachPlace(const Each& each, std::index_sequence<kPlace...>) {
  (each(std::integral_constant<size_t, kPlace>()), ...);
}
template <class Kernel, class Each>
HWY_INLINE void ForEachPlace(const Each& each) {
  ForEachPlace(each, std::make_index_sequence<Kernel::kPlanes>());
}

// The new values of one vector from `index` of each array; returns that of the shard.
template <class Kernel, DType kGradient, bool kCareful>
HWY_INLINE FloatVec ComputeVector(const RuleRun& run, const typename Kernel::Scalars& s,
                                  size_t index, PlaneVecs<Kernel>& planes, LargeMask& large) {
  const FloatTag d;
  ForEachPlace<Kernel>([&](auto place)
                           HWY_ATTR { planes[place] = hn::LoadU(d, run.from[place] + index); });
  return Kernel::template Compute<kCareful>(s, LoadAs<kGradient>(d, run.gradient, index), planes,
                                            large);
}

// One turn from `index`. False, and nothing is stored, if the quick way does not do. `redo` is
// nullable: the new values, for a process that finishes the turn.
template <class Kernel, DType kGradient, bool kHasShard, DType kShard, bool kCareful>
HWY_INLINE bool UpdateTurn(const RuleRun& r, const typename Kernel::Scalars& s, size_t index,
                           bool stream, RedoWriter* redo) {
  const FloatTag d;
  const size_t lanes = hn::Lanes(d);
  const size_t next = index + lanes;
  LargeMask large = hn::FirstN(hn::RebindToSigned<FloatTag>(), lanes);
  PlaneVecs<Kernel> low, high;
  const FloatVec low_shard = ComputeVector<Kernel, kGradient, kCareful>(r, s, index, low, large);
  const FloatVec high_shard = ComputeVector<Kernel, kGradient, kCareful>(r, s, next, high, large);
  if (!kCareful && !hn::AllTrue(hn::RebindToSigned<FloatTag>(), large)) return false;
  if (redo != nullptr) {
    RedoTurn& turn = redo->next();
    ForEachPlace<Kernel>([&](auto place) HWY_ATTR {
      hn::StoreU(low[place], d, turn.plane(place));
      hn::StoreU(high[place], d, turn.plane(place) + lanes);
    });
    redo->Record(static_cast<int64_t>(2 * lanes));
  }
  ForEachPlace<Kernel>([&](auto place) HWY_ATTR {
    hn::StoreU(low[place], d, r.to[place] + index);
    hn::StoreU(high[place], d, r.to[place] + next);
  });
  if constexpr (kHasShard) StorePairAs<kShard>(d, low_shard, high_shard, r.shard, index, stream);
  return true;
}

// Asks for the cache lines of elements [index, index + elements) of all sources.
template <class Kernel, DType kGradient>
HWY_INLINE void PrefetchSources(const RuleRun& run, size_t index, size_t elements) {
  constexpr size_t kLineBytes = 64;
  const char* gradient = static_cast<const char*>(run.gradient) + index * SizeBytes(kGradient);
  for (size_t byte = 0; byte < elements * SizeBytes(kGradient); byte += kLineBytes) {
    hwy::Prefetch(gradient + byte);
  }
  constexpr size_t kLineElements = kLineBytes / sizeof(float);
  for (size_t i = index; i < index + elements; i += kLineElements) {
    ForEachPlace<Kernel>([&](auto place) HWY_ATTR { hwy::Prefetch(run.from[place] + i); });
  }
}

// Elements that one turn of the loop updates: a whole vector of 16-bit elements.
HWY_INLINE size_t TurnElements() { return 2 * hn::Lanes(FloatTag()); }

// A whole number of turns. A streamed shard is aligned to a vector. Whether to stream is asked in
// each turn: a loop of its own for it would nearly double what is compiled, and is no faster.
template <class Kernel, DType kGradient, bool kHasShard, DType kShard>
HWY_NOINLINE void UpdateTurns(const RuleRun& run, const typename Kernel::Scalars& scalars,
                              bool stream, RedoWriter* redo) {
  constexpr size_t kPrefetchAhead = 512;
  constexpr size_t kPrefetchElements = 32;  // The elements in a line of 16-bit gradients.
  const RuleRun r = run;                    // Copies that no store can change.
  const typename Kernel::Scalars s = scalars;
  const auto elements = static_cast<size_t>(r.elements);
  const size_t turn = TurnElements();
  const size_t prefetch = std::max(turn, kPrefetchElements);
  const auto update = [&r, &s, stream, redo]<bool kCareful>(size_t index,
                                                            std::bool_constant<kCareful>) HWY_ATTR {
    return UpdateTurn<Kernel, kGradient, kHasShard, kShard, kCareful>(r, s, index, stream, redo);
  };
  size_t careful_until = Kernel::IsCareful(s) ? elements : 0;
  for (size_t i = 0; i < elements; i += turn) {
    if (i >= careful_until && !update(i, std::false_type())) careful_until = i + kCarefulElements;
    if (i < careful_until) update(i, std::true_type());
    // After the turn, whose own loads would else wait behind what is not needed yet: 1.38 in place
    // of 1.19 Gparam/s on one thread.
    if (i % prefetch == 0) PrefetchSources<Kernel, kGradient>(r, i + kPrefetchAhead, prefetch);
  }
}

// Less than a turn, in a padded copy, so that a tail needs no second version of the formula.
template <class Kernel, DType kGradient, bool kHasShard, DType kShard>
HWY_NOINLINE void UpdatePadded(const RuleRun& run, const typename Kernel::Scalars& s,
                               RedoWriter* redo) {
  constexpr size_t kMaxTurn = 2 * hn::MaxLanes(FloatTag());
  const size_t elements = static_cast<size_t>(run.elements);
  const size_t bytes = elements * sizeof(float);
  float gradient[kMaxTurn] = {};
  float planes[Kernel::kPlanes][kMaxTurn] = {};
  float shard[kMaxTurn];
  std::memcpy(gradient, run.gradient, elements * SizeBytes(kGradient));

  RuleRun padded = run;
  padded.elements = static_cast<int64_t>(TurnElements());
  padded.gradient = gradient;
  padded.shard = shard;
  for (size_t place = 0; place < Kernel::kPlanes; ++place) {
    std::memcpy(planes[place], run.from[place], bytes);
    padded.from[place] = padded.to[place] = planes[place];
  }
  UpdateTurns<Kernel, kGradient, kHasShard, kShard>(padded, s, /*stream=*/false, nullptr);
  if (redo != nullptr) {
    RedoTurn& turn = redo->next();
    for (size_t place = 0; place < Kernel::kPlanes; ++place) {
      std::memcpy(turn.plane(static_cast<int>(place)), planes[place], bytes);
    }
    redo->Record(run.elements);
  }

  for (size_t place = 0; place < Kernel::kPlanes; ++place) {
    std::memcpy(run.to[place], planes[place], bytes);
  }
  if constexpr (kHasShard) std::memcpy(run.shard, shard, elements * SizeBytes(kShard));
}

// Elements [begin, begin + elements) of `run`.
template <class Kernel, DType kGradient, bool kHasShard, DType kShard>
HWY_INLINE RuleRun Slice(RuleRun run, int64_t begin, int64_t elements) {
  run.elements = elements;
  run.gradient = static_cast<const char*>(run.gradient) + begin * SizeBytes(kGradient);
  for (size_t place = 0; place < Kernel::kPlanes; ++place) {
    run.from[place] += begin;
    run.to[place] += begin;
  }
  if constexpr (kHasShard) run.shard = static_cast<char*>(run.shard) + begin * SizeBytes(kShard);
  return run;
}

// A padded head up to the first shard address that can be streamed to, whole turns, a padded tail.
template <class Kernel, DType kGradient, bool kHasShard, DType kShard>
void UpdateRun(const RuleRun& run, const typename Kernel::Scalars& s, RedoWriter* redo) {
  const int64_t turn = static_cast<int64_t>(TurnElements());
  if (redo != nullptr) Check(turn <= kUpdateTurnElements, "a turn's record holds a turn");
  const auto slice = Slice<Kernel, kGradient, kHasShard, kShard>;
  int64_t head = 0;
  if constexpr (kHasShard) {
    const size_t vector_bytes = hn::Lanes(FloatTag()) * sizeof(float);
    const size_t past = reinterpret_cast<uintptr_t>(run.shard) % vector_bytes;
    if (past != 0) head = static_cast<int64_t>(vector_bytes - past) / SizeBytes(kShard);
    head = std::min(head, run.elements);
  }
  const int64_t whole = (run.elements - head) / turn * turn;
  const int64_t tail = run.elements - head - whole;
  const auto padded = UpdatePadded<Kernel, kGradient, kHasShard, kShard>;
  if (head > 0) padded(slice(run, 0, head), s, redo);
  if (whole > 0) {
    // Where the gradient was just read, the line is in the cache anyway.
    const bool stream = kHasShard && run.shard != run.gradient;
    UpdateTurns<Kernel, kGradient, kHasShard, kShard>(slice(run, head, whole), s, stream, redo);
    // What was streamed becomes visible to a thread that learns of it by an ordinary store.
    if (stream) hwy::FlushStream();
  }
  if (tail > 0) padded(slice(run, head + whole, tail), s, redo);
}

// The formats are chosen here, above every loop.
template <class Kernel, DType kGradient>
void UpdateForShard(const RuleRun& run, const typename Kernel::Scalars& s, RedoWriter* redo) {
  if (run.shard == nullptr) {
    return UpdateRun<Kernel, kGradient, false, DType::kFloat32>(run, s, redo);
  }
  switch (run.shard_dtype) {
    case DType::kBFloat16:
      return UpdateRun<Kernel, kGradient, true, DType::kBFloat16>(run, s, redo);
    case DType::kFloat16:
      return UpdateRun<Kernel, kGradient, true, DType::kFloat16>(run, s, redo);
    case DType::kFloat32:
      return UpdateRun<Kernel, kGradient, true, DType::kFloat32>(run, s, redo);
  }
}

// What both kinds of runs have (packed-inl.h has that of packed state).
HWY_INLINE const RuleRun& RuleOf(const RuleRun& run) { return run; }
HWY_INLINE bool HasPlace(const RuleRun& run, size_t place) { return run.from[place] != nullptr; }

template <class Kernel>
void UpdateByKernel(const RuleRun& run, const typename Kernel::Scalars& s, RedoWriter* redo) {
  switch (run.gradient_dtype) {
    case DType::kBFloat16:
      return UpdateForShard<Kernel, DType::kBFloat16>(run, s, redo);
    case DType::kFloat16:
      return UpdateForShard<Kernel, DType::kFloat16>(run, s, redo);
    case DType::kFloat32:
      return UpdateForShard<Kernel, DType::kFloat32>(run, s, redo);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace ballast
HWY_AFTER_NAMESPACE();

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_TURNS_INL_H_
