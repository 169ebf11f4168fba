// Who has sent what: backwards that reached nothing, and what is shown of a step in progress.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cpu_optimizer_service/job/job_impl.h"

namespace ballast {

std::optional<SealRefusal> JobImpl::CheckBackwardReached(const OpenStep& open, int rank) const {
  const std::optional<uint32_t> micro_step = open.ranks()[rank].reached_nothing;
  // The other policies let a worker declare that it used none.
  if (!micro_step.has_value() || spec_.unused_policy != UnusedPolicy::kError) return std::nullopt;
  int64_t count = 0;
  MissingContribution missing = {.rank = rank, .micro_step = *micro_step, .parameters = {}};
  for (int p = 0; p < static_cast<int>(spec_.layout.parameters.size()); ++p) {
    const ParameterSpec& parameter = spec_.layout.parameters[p];
    if (!parameter.trainable || layout_.place(p).elements == 0) continue;
    if (++count <= static_cast<int64_t>(kMissingNames))
      missing.parameters.push_back(parameter.name);
  }
  if (count == 0) return std::nullopt;
  const bool more = count > static_cast<int64_t>(missing.parameters.size());
  absl::Status status = absl::FailedPreconditionError(absl::StrCat(
      "step ", open.terms().step, ": rank ", rank, ", micro-step ", *micro_step,
      ": backward reached none of its ", count, " parameters (",
      absl::StrJoin(missing.parameters, ", "), more ? ", ..." : "",
      "); see why its hooks did not fire, abort the step and redo it; if it is meant, create the "
      "job with unused_policy skip or zero"));
  return SealRefusal{std::move(status), {std::move(missing)}};
}

std::optional<SealRefusal> JobImpl::CheckEmpties(const OpenStep& open) const {
  for (const auto& [chunk, empties] : open.empties()) {
    for (const ChunkPiece& piece : layout_.Pieces(chunk)) {
      for (const auto& [begin, end] : empties) {
        const std::optional<uint32_t> micro_step = open.FirstUse(piece.parameter, begin, end);
        if (!micro_step.has_value()) continue;
        const std::string& name = spec_.layout.parameters[piece.parameter].name;
        const int owner = layout_.chunks()[chunk].rank;
        return SealRefusal{absl::FailedPreconditionError(
                               absl::StrCat("step ", open.terms().step, ": parameter ", name,
                                            " received a gradient in micro-step ", *micro_step,
                                            ", but was sent as empty (chunk ", chunk, " from rank ",
                                            owner, "); abort the step and redo it")),
                           {{.rank = owner, .micro_step = *micro_step, .parameters = {name}}}};
      }
    }
  }
  return std::nullopt;
}

RankProgress JobImpl::ProgressOf(int rank, const RankInStep* state) const {
  const absl::Span<const int> chunks = layout_.chunks_of_rank(rank);
  RankProgress progress;
  progress.attached = !ranks_[rank].process_id.empty();
  progress.process_id = ranks_[rank].process_id;
  progress.shared_memory = ranks_[rank].memory != nullptr;
  progress.chunks = static_cast<int64_t>(chunks.size());
  if (state == nullptr) return progress;
  progress.begun = state->begun;
  progress.micro_steps_ended = state->micro_steps_ended;
  progress.sealed = state->sealed.has_value();
  progress.furthest_micro_step = state->sealed.value_or(0);
  for (const int chunk : chunks) {
    progress.furthest_micro_step =
        std::max(progress.furthest_micro_step, ledger_.next_micro_step(chunk));
  }
  if (progress.furthest_micro_step == 0) return progress;  // Nothing has come, nothing is behind.
  progress.chunks_complete = std::count_if(
      chunks.begin(), chunks.end(), [&](int chunk) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        return ledger_.next_micro_step(chunk) == progress.furthest_micro_step;
      });
  progress.missing_parameters = NamesBehind(rank, progress.furthest_micro_step);
  return progress;
}

std::vector<std::string> JobImpl::NamesBehind(int rank, uint32_t micro_step) const {
  std::vector<std::string> names;
  int group = -1;
  int64_t named_end = 0;  // The parameters before this element of the group have been looked at.
  // Goes from parameter to parameter, since a chunk may hold a quarter of a million of them.
  for (const int index : layout_.chunks_of_rank(rank)) {
    if (ledger_.next_micro_step(index) == micro_step) continue;
    const Chunk& chunk = layout_.chunks()[index];
    if (chunk.group != group) named_end = 0;
    group = chunk.group;
    const int64_t end = chunk.begin + chunk.elements;
    for (int64_t at = std::max(named_end, chunk.begin); at < end; at = named_end) {
      const int parameter = layout_.ParameterAt(group, at);
      if (parameter == -1) break;  // Padding.
      names.push_back(spec_.layout.parameters[parameter].name);
      if (names.size() == kMissingNames) return names;
      named_end = layout_.place(parameter).offset + layout_.place(parameter).elements;
    }
  }
  return names;
}

}  // namespace ballast
