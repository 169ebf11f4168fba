// The formulas of common/rules/ except Adam's, a vector at a time. Included once per instruction set.
//
// Z of what is read is left out: it is flushed when used, and its sign ends in a P or in the Z of a
// sum.
#if defined(BALLAST_CPU_OPTIMIZER_SERVICE_RULES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BALLAST_CPU_OPTIMIZER_SERVICE_RULES_INL_H_
#undef BALLAST_CPU_OPTIMIZER_SERVICE_RULES_INL_H_
#else
#define BALLAST_CPU_OPTIMIZER_SERVICE_RULES_INL_H_
#endif

#include <cstdint>

#include "cpu_optimizer_service/common/rules/adagrad.h"
#include "cpu_optimizer_service/common/rules/lion.h"
#include "cpu_optimizer_service/common/rules/muon.h"
#include "cpu_optimizer_service/common/rules/sgd.h"
#include "cpu_optimizer_service/common/rules/sign_sgd.h"
#include "cpu_optimizer_service/kernels/turns-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ballast {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// P(factor * x) in the careful way; for an operand of a sum that `large` looks at.
template <bool kCareful>
HWY_INLINE FloatVec Times(float factor, FloatVec x) {
  return PIf<kCareful>(hn::Mul(hn::Set(FloatTag(), factor), x));
}

// lr * sign(x), of which Z was taken.
HWY_INLINE FloatVec SignOf(FloatVec x, float lr) {
  const FloatTag d;
  const auto has_sign = hn::Gt(hn::Abs(x), hn::Zero(d));
  return hn::IfThenElse(has_sign, hn::CopySign(hn::Set(d, lr), x), x);
}

template <bool kMomentum>
struct SgdKernel {
  static constexpr size_t kPlanes = kMomentum ? 2 : 1;
  using Scalars = SgdScalars;
  static bool IsCareful(const SgdScalars&) { return false; }

  template <bool kCareful>
  static HWY_INLINE FloatVec Compute(const SgdScalars& s, FloatVec gradient,
                                     FloatVec (&planes)[kPlanes], LargeMask& large) {
    const FloatTag d;
    FloatVec g = AddProduct<kCareful>(Times<kCareful>(s.multiplier, gradient),
                                      hn::Mul(hn::Set(d, s.weight_decay), planes[0]), large);
    if constexpr (kMomentum) {
      FloatVec b = g;
      if (!s.first) {
        b = AddProduct<kCareful>(Times<kCareful>(s.momentum, planes[1]),
                                 hn::Mul(hn::Set(d, s.gain), g), large);
      }
      planes[1] = b;
      g = s.nesterov ? AddProduct<kCareful>(g, hn::Mul(hn::Set(d, s.momentum), b), large) : b;
    }
    return planes[0] = AddProduct<kCareful>(planes[0], hn::Mul(hn::Set(d, -s.lr), g), large);
  }
};

struct LionKernel {
  static constexpr size_t kPlanes = 2;
  using Scalars = LionScalars;
  static bool IsCareful(const LionScalars&) { return false; }

  template <bool kCareful>
  static HWY_INLINE FloatVec Compute(const LionScalars& s, FloatVec gradient,
                                     FloatVec (&planes)[kPlanes], LargeMask& large) {
    const FloatTag d;
    const FloatVec g = Times<kCareful>(s.multiplier, gradient);
    const FloatVec c = AddProduct<kCareful>(Times<kCareful>(s.beta1, planes[1]),
                                            hn::Mul(hn::Set(d, s.one_minus_beta1), g), large);
    planes[0] =
        AddValue<kCareful>(Times<kCareful>(s.decay, planes[0]), SignOf(hn::Neg(c), s.lr), large);
    planes[1] = AddProduct<kCareful>(Times<kCareful>(s.beta2, planes[1]),
                                     hn::Mul(hn::Set(d, s.one_minus_beta2), g), large);
    return planes[0];
  }
};

struct AdagradKernel {
  static constexpr size_t kPlanes = 2;
  static constexpr bool kHasSum = true;
  using Scalars = AdagradScalars;
  static bool IsCareful(const AdagradScalars& s) { return s.step_size > 1; }

  template <bool kCareful>
  static HWY_INLINE FloatVec Compute(const AdagradScalars& s, FloatVec gradient,
                                     FloatVec (&planes)[kPlanes], LargeMask& large) {
    const FloatTag d;
    const FloatVec g = AddProduct<kCareful>(Times<kCareful>(s.multiplier, gradient),
                                            hn::Mul(hn::Set(d, s.weight_decay), planes[0]), large);
    planes[1] = AddProduct<kCareful>(planes[1], hn::Mul(g, g), large);
    const FloatVec denominator = hn::Add(hn::Sqrt(planes[1]), hn::Set(d, s.eps));
    return planes[0] = StepByQuotient<kCareful>(planes[0], s.step_size, g, denominator, large);
  }
};

struct SignSgdKernel {
  static constexpr size_t kPlanes = 1;
  using Scalars = SignSgdScalars;
  static bool IsCareful(const SignSgdScalars&) { return false; }

  template <bool kCareful>
  static HWY_INLINE FloatVec Compute(const SignSgdScalars& s, FloatVec gradient,
                                     FloatVec (&planes)[kPlanes], LargeMask& large) {
    // P in both ways: no sum has this product, so nobody looks whether it is 2^-126.
    const FloatVec g = P(hn::Mul(gradient, hn::Set(FloatTag(), s.multiplier)));
    return planes[0] = AddValue<kCareful>(Times<kCareful>(s.decay, planes[0]),
                                          SignOf(hn::Neg(g), s.lr), large);
  }
};

template <bool kIsAgain>
struct MuonDirectionKernel {
  static constexpr size_t kPlanes = 1;  // momentum_buffer
  using Scalars = MuonDirectionScalars;
  static bool IsCareful(const Scalars&) { return false; }

  template <bool kCareful>
  static HWY_INLINE FloatVec Compute(const Scalars& s, FloatVec gradient,
                                     FloatVec (&planes)[kPlanes], LargeMask& large) {
    const FloatTag d;
    const FloatVec g = Times<kCareful>(s.gain, gradient);
    if constexpr (kIsAgain) {
      planes[0] = Z(planes[0]);
    } else {
      planes[0] = AddProduct<kCareful>(g, hn::Mul(hn::Set(d, s.momentum), planes[0]), large);
    }
    if (!s.nesterov) return planes[0];
    return AddProduct<kCareful>(g, hn::Mul(hn::Set(d, s.momentum), planes[0]), large);
  }
};

struct MuonWeightKernel {
  static constexpr size_t kPlanes = 1;  // master
  using Scalars = MuonWeightScalars;
  static bool IsCareful(const Scalars&) { return false; }

  template <bool kCareful>
  static HWY_INLINE FloatVec Compute(const Scalars& s, FloatVec orthogonal,
                                     FloatVec (&planes)[kPlanes], LargeMask& large) {
    const FloatVec step = hn::Mul(hn::Set(FloatTag(), -s.step), orthogonal);
    return planes[0] = AddProduct<kCareful>(Times<kCareful>(s.decay, planes[0]), step, large);
  }
};

// `Run`: RuleRun or PackedRun.
template <class Run>
void UpdateBySgd(const Run& run, RedoWriter* redo) {
  const SgdScalars s = MakeSgdScalars(RuleOf(run));
  if (HasPlace(run, 1)) return UpdateByKernel<SgdKernel<true>>(run, s, redo);
  return UpdateByKernel<SgdKernel<false>>(run, s, redo);
}
template <class Run>
void UpdateByLion(const Run& run, RedoWriter* redo) {
  UpdateByKernel<LionKernel>(run, MakeLionScalars(RuleOf(run)), redo);
}
template <class Run>
void UpdateByAdagrad(const Run& run, RedoWriter* redo) {
  UpdateByKernel<AdagradKernel>(run, MakeAdagradScalars(RuleOf(run)), redo);
}
template <class Run>
void UpdateBySignSgd(const Run& run, RedoWriter* redo) {
  UpdateByKernel<SignSgdKernel>(run, MakeSignSgdScalars(RuleOf(run)), redo);
}

}  // namespace HWY_NAMESPACE
}  // namespace ballast
HWY_AFTER_NAMESPACE();

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_RULES_INL_H_
