#include "cpu_optimizer_service/job/update/second_round.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/rounding.h"
#include "cpu_optimizer_service/common/rule.h"
#include "cpu_optimizer_service/common/rules/arithmetic.h"
#include "cpu_optimizer_service/common/rules/muon.h"
#include "cpu_optimizer_service/job/update/executor.h"
#include "cpu_optimizer_service/kernels/newton_schulz.h"

namespace ballast {
namespace {

// Of a matrix, where it is copied.
constexpr int64_t kElementsTogether = 1 << 18;

}  // namespace

double LargestOf(absl::Span<const uint16_t> bf16) {
  uint16_t largest = 0;
  for (const uint16_t bits : bf16) largest = std::max<uint16_t>(largest, bits & 0x7fff);
  const float value = std::bit_cast<float>(uint32_t{largest} << 16);
  return std::isfinite(value) ? value : StateBounds::kUnknown;
}

std::vector<int> MatricesOf(const Layout& layout, const StepUpdate& update) {
  std::vector<int> matrices;
  const std::vector<ParameterSpec>& parameters = layout.spec().parameters;
  for (int p = 0; p < static_cast<int>(parameters.size()); ++p) {
    if (update.update_counts[p] > 0 && layout.place(p).elements > 0 &&
        RowOf(update.hyper_parameters[parameters[p].group].rule).rounds > 1) {
      matrices.push_back(p);
    }
  }
  return matrices;
}

double WeightBoundAfter(const HyperParameters& values, const std::vector<int64_t>& shape,
                        double weight, double orthogonal) {
  const double decay = std::fabs(1 - values.lr * values.weight_decay);
  const double step = values.lr * AdjustmentOf(values, shape[0], shape[1]);
  const double after = kRounding * (decay * weight + step * orthogonal);
  return Bounded({after}, {decay, step, orthogonal}).master();
}

std::string WhatWasLeft(const LayoutSpec& layout, const SecondDecision& decision) {
  if (decision.left.empty()) return "";
  const size_t more = decision.left.size() - 1;
  return absl::StrCat("the weights of ", layout.parameters[decision.left.front()].name,
                      more == 0 ? "" : absl::StrCat(" and ", more, " more"),
                      " were left as they were: ", decision.why);
}

StepUpdate SecondUpdateOf(const KeptDirections& directions) {
  const StepOutcome& outcome = directions.record.outcome;
  StepUpdate update = {.step = outcome.step,
                       .hyper_parameters = directions.record.hyper_parameters,
                       .multipliers = outcome.decision.multipliers,
                       .update_counts = directions.update_counts,
                       .has_second_round = true};
  if (!directions.second.has_value()) return update;
  for (const int parameter : directions.second->left) update.update_counts[parameter] = 0;
  return update;
}

// ---------------------------------------------------------------- the executor's part

void Executor::MakeDirections(const StepUpdate& update, int chunk) {
  if (!HasTwoRounds(chunk)) return;
  ballast::MakeDirections(
      UpdateOf(update, chunk, memory_.store->Published(chunk)),
      [&](int parameter) { return update.update_counts[parameter]; },
      memory_.directions->direction(chunk));
}

// Matrices are orthogonalized one after the other. Each loop's end starts the next one, on an
// engine's thread, so that no thread waits.
struct Executor::Orthogonalizing {
  std::shared_ptr<const StepUpdate> update;
  std::function<void(std::vector<double>)> then;

  std::vector<int> matrices;  // Those left, the next one last.
  std::optional<NewtonSchulz> newton_schulz;
  std::vector<Loop> loops;  // Of the matrix.
  size_t next_loop = 0;
  std::vector<double> of_pieces;  // The largest magnitude of O; of the matrix,
  std::vector<double> largest;    // and by parameter.
};

void Executor::Orthogonalize(std::shared_ptr<const StepUpdate> update,
                             std::function<void(std::vector<double> largest)> then) {
  auto work = std::make_shared<Orthogonalizing>();
  work->update = std::move(update);
  work->then = std::move(then);
  work->largest.resize(core_.spec().layout.parameters.size());
  work->matrices = MatricesOf(core_.layout, *work->update);
  std::ranges::reverse(work->matrices);
  RunNextLoop(std::move(work));
}

void Executor::RunNextLoop(std::shared_ptr<Orthogonalizing> work) {
  if (work->next_loop == work->loops.size()) {
    if (work->newton_schulz.has_value()) EndMatrix(*work);
    if (work->matrices.empty()) return work->then(std::move(work->largest));
    BeginMatrix(*work);
  }
  const Loop& loop = work->loops[work->next_loop++];
  core_.environment.tasks->ForEach(loop.count, loop.body,
                                   [this, keep = core_.KeepAlive(), work] { RunNextLoop(work); });
}

void Executor::BeginMatrix(Orthogonalizing& work) {
  const int p = work.matrices.back();
  const ParameterSpec& parameter = core_.spec().layout.parameters[p];
  work.newton_schulz.emplace(parameter.shape[0], parameter.shape[1],
                             work.update->hyper_parameters[parameter.group],
                             memory_.directions->scratch());
  const int64_t elements = core_.layout.place(p).elements;
  const int64_t pieces = DivideUp(elements, kElementsTogether);
  const auto piece_of = [elements](auto matrix, int64_t index) {
    return matrix.subspan(index * kElementsTogether,
                          std::min(kElementsTogether, elements - index * kElementsTogether));
  };
  work.of_pieces.assign(pieces, 0);
  work.loops = work.newton_schulz->loops();
  work.loops.insert(work.loops.begin(),
                    {.count = pieces, .body = [this, p, piece_of, &work](int64_t index) {
                       memory_.directions->Gather(p, index * kElementsTogether,
                                                  piece_of(work.newton_schulz->direction(), index));
                     }});
  work.loops.push_back({.count = pieces, .body = [this, p, piece_of, &work](int64_t index) {
                          const auto piece = piece_of(work.newton_schulz->orthogonal(), index);
                          work.of_pieces[index] = LargestOf(piece);
                          memory_.directions->Scatter(p, index * kElementsTogether, piece);
                        }});
  work.next_loop = 0;
}

void Executor::EndMatrix(Orthogonalizing& work) {
  work.largest[work.matrices.back()] = *std::ranges::max_element(work.of_pieces);
  work.matrices.pop_back();
  work.newton_schulz.reset();
}

void Executor::DecideMatrix(const StepUpdate& update, int parameter, double largest,
                            double bound_before, SecondRound& round) const {
  const ParameterSpec& matrix = core_.spec().layout.parameters[parameter];
  const HyperParameters& values = update.hyper_parameters[matrix.group];
  double after = WeightBoundAfter(values, matrix.shape, bound_before, largest);
  if (!std::isfinite(after) && std::isfinite(largest)) {
    after = WeightBoundAfter(values, matrix.shape, LargestWeight(parameter), largest);
  }
  if (std::isfinite(after)) {
    double& bound = round.bounds[matrix.group].planes[0];
    bound = std::max(bound, after);
    return;
  }
  if (round.decision.left.empty()) {
    round.decision.why = absl::StrCat(
        "Newton-Schulz of ", matrix.name, "'s direction gave ",
        std::isfinite(largest) ? "a step that fp32 does not hold" : "values that are not finite");
  }
  round.decision.left.push_back(parameter);
}

double Executor::LargestWeight(int parameter) const {
  double largest = 0;
  core_.layout.VisitRange(
      parameter, 0, core_.layout.place(parameter).elements, [&](const ChunkPiece& piece) {
        const float* const weights =
            memory_.store->Published(piece.chunk)[Plane::kMaster] + piece.chunk_offset;
        for (int64_t i = 0; i < piece.elements; ++i) {
          largest = std::max<double>(largest, std::fabs(weights[i]));
        }
      });
  return largest;
}

SecondRound Executor::DecideSecond(const StepUpdate& update, const std::vector<StateBounds>& bounds,
                                   const std::vector<double>& largest) const {
  SecondRound round = {.decision = {}, .bounds = bounds};
  round.bounds.resize(core_.layout.group_count());
  for (const int p : MatricesOf(core_.layout, update)) {
    const int group = core_.spec().layout.parameters[p].group;
    DecideMatrix(update, p, largest[p],
                 bounds.empty() ? StateBounds::kUnknown : bounds[group].master(), round);
  }
  return round;
}

UpdatePlan Executor::MakeSecondPlan(StepUpdate update, const std::vector<uint64_t>& streams) {
  UpdatePlan plan = {.outcome = {},
                     .update = std::move(update),
                     .listeners = ranks_.ByRank(),
                     .weights_in_place = ranks_.WeightsMemories(),
                     .speculation = {}};
  for (int rank = 0; rank < ranks_.size(); ++rank) {
    plan.lacks_first_round.push_back(ranks_[rank].stream != streams[rank]);
  }
  return plan;
}

void Executor::CarryOutSecond(std::shared_ptr<UpdatePlan> plan, std::function<void()> then) {
  core_.environment.tasks->ForEach(
      static_cast<int64_t>(core_.layout.chunks().size()),
      [this, keep = core_.KeepAlive(), plan](int64_t index) {
        const int chunk = static_cast<int>(index);
        if (HasTwoRounds(chunk)) return ApplyToChunk(*plan, chunk, Round::kSecond);
        const int rank = core_.layout.chunks()[chunk].rank;
        if (plan->lacks_first_round[rank]) SendPublishedWeights(*plan, chunk);
      },
      std::move(then));
}

}  // namespace ballast
