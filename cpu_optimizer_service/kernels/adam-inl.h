// The formula of common/rules/adam.h, a vector at a time. Included once per instruction set.
#if defined(BALLAST_CPU_OPTIMIZER_SERVICE_ADAM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BALLAST_CPU_OPTIMIZER_SERVICE_ADAM_INL_H_
#undef BALLAST_CPU_OPTIMIZER_SERVICE_ADAM_INL_H_
#else
#define BALLAST_CPU_OPTIMIZER_SERVICE_ADAM_INL_H_
#endif

#include "cpu_optimizer_service/common/rules/adam.h"
#include "cpu_optimizer_service/kernels/turns-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ballast {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Where the formula's Z or P is left out even of the careful way, it could not be seen:
//   Z of what is read       flushed when used, and its sign ends in a P or in the Z of a sum
//   P(g * multiplier)       without L2 decay: what 2^-126 becomes times 1 - beta1 <= 1, P makes
//                           zero, and as 1 - beta2 is zero or normal, so it does below
//   P(one_minus_beta2 * g)  2^-126 or less means |g| <= 1, so the product with g is 2^-126 or less
//   P(m / d)                see StepByQuotient
template <WeightDecay kDecay, bool kAmsgrad>
struct AdamKernel {
  static constexpr size_t kPlanes = kAmsgrad ? 4 : 3;
  using Scalars = AdamScalars;

  static bool IsCareful(const AdamScalars& s) { return s.step_size > 1; }

  template <bool kCareful>
  static HWY_INLINE FloatVec Compute(const AdamScalars& s, FloatVec gradient,
                                     FloatVec (&planes)[kPlanes], LargeMask& large) {
    const FloatTag d;
    FloatVec g = hn::Mul(gradient, hn::Set(d, s.multiplier));
    FloatVec w = planes[0];
    if constexpr (kDecay == WeightDecay::kL2) {
      const FloatVec decay = hn::Mul(hn::Set(d, s.weight_decay), w);
      g = AddProduct<kCareful>(PIf<kCareful>(g), decay, large);
    }
    if constexpr (kDecay == WeightDecay::kDecoupled) {
      w = PIf<kCareful>(hn::Mul(w, hn::Set(d, s.decay)));
    }
    const FloatVec m = AddProduct<kCareful>(PIf<kCareful>(hn::Mul(hn::Set(d, s.beta1), planes[1])),
                                            hn::Mul(hn::Set(d, s.one_minus_beta1), g), large);
    const FloatVec v =
        AddProduct<kCareful>(PIf<kCareful>(hn::Mul(hn::Set(d, s.beta2), planes[2])),
                             hn::Mul(hn::Mul(hn::Set(d, s.one_minus_beta2), g), g), large);
    planes[1] = m;
    planes[2] = v;

    FloatVec used_v = v;
    if constexpr (kAmsgrad) {
      const FloatVec vm = Z(planes[3]);
      used_v = hn::IfThenElse(hn::Or(hn::Lt(v, vm), hn::IsNaN(vm)), vm, v);
      planes[3] = used_v;
    }
    const FloatVec denominator = hn::Add(
        hn::Mul(hn::Sqrt(used_v), hn::Set(d, s.inverse_sqrt_bias_correction2)), hn::Set(d, s.eps));
    return planes[0] = StepByQuotient<kCareful>(w, s.step_size, m, denominator, large);
  }
};

// The options are chosen here, above every loop. `Run`: RuleRun or PackedRun.
template <WeightDecay kDecay, class Run>
void UpdateForAmsgrad(const Run& run, const AdamScalars& s, RedoWriter* redo) {
  if (HasPlace(run, 3)) return UpdateByKernel<AdamKernel<kDecay, true>>(run, s, redo);
  return UpdateByKernel<AdamKernel<kDecay, false>>(run, s, redo);
}

template <class Run>
void UpdateByAdam(const Run& run, const AdamScalars& s, RedoWriter* redo) {
  switch (s.weight_decay_kind) {
    case WeightDecay::kNone:
      return UpdateForAmsgrad<WeightDecay::kNone>(run, s, redo);
    case WeightDecay::kDecoupled:
      return UpdateForAmsgrad<WeightDecay::kDecoupled>(run, s, redo);
    case WeightDecay::kL2:
      return UpdateForAmsgrad<WeightDecay::kL2>(run, s, redo);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace ballast
HWY_AFTER_NAMESPACE();

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_ADAM_INL_H_
