#include "tests/histories/script.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/float_format.h"
#include "tests/histories/random.h"

namespace ballast::histories {

Attempt Normalize(const JobPlan& job, Attempt attempt, const Layout& layout) {
  const bool applies = attempt.spoil == Spoil::kPadding ? !layout.padding().empty()
                                                        : SpoiledParameter(job, attempt) != -1;
  // A tiny gradient may be zero on the wire, and is none then.
  const bool vanishes = attempt.spoil == Spoil::kUndeclared && attempt.gradient_size < 1;
  if (!applies || vanishes) attempt.spoil = Spoil::kNone;
  attempt.end_rank %= job.world_size;
  for (Event& event : attempt.events) event.rank %= job.world_size;
  attempt.looks &= (1u << job.world_size) - 1;
  if (attempt.looks == 0) attempt.spikes = 0;
  std::erase_if(attempt.vote.overrides, [&](const auto& of_group) {
    return of_group.first >= static_cast<int>(job.groups.size());
  });
  return attempt;
}

Script::Script(const JobPlan& job, const Attempt& attempt, const Layout& layout)
    : job_(job),
      attempt_(attempt),
      layout_(layout),
      spoiled_(attempt.spoil == Spoil::kUndeclared || attempt.spoil == Spoil::kSentEmpty
                   ? SpoiledParameter(job, attempt)
                   : -1) {}

int Script::SegmentCount(int chunk) const {
  return static_cast<int>(attempt_.segments[layout_.chunks()[chunk].group].size());
}

std::pair<uint32_t, uint32_t> Script::Range(int chunk, int segment) const {
  const std::vector<uint32_t>& ends = attempt_.segments[layout_.chunks()[chunk].group];
  return {segment == 0 ? 0 : ends[segment - 1], ends[segment]};
}

bool Script::IsFinal(int chunk, int segment) const {
  return !attempt_.may_guess && segment + 1 == SegmentCount(chunk);
}

bool Script::MayGuess(int chunk, int segment) const {
  const bool last = segment + 1 == SegmentCount(chunk);
  const bool takes = Mix(attempt_.gradient_seed + 7 * chunk + segment) % (last ? 4 : 3) != 0;
  return attempt_.may_guess && takes;
}

std::vector<Call> Script::CallsOf(int rank) const {
  Random random(attempt_.order_seed + rank);
  std::vector<Call> calls = {{.kind = CallKind::kBegin, .rank = rank}};
  std::vector<Call> withheld;
  const auto is_withheld = [&](int chunk, int segment) {
    const auto chunks = layout_.chunks_of_rank(rank);
    for (const Event& event : attempt_.events) {
      if (event.kind != EventKind::kWithhold || event.rank != rank) continue;
      const int from = event.pick / 7 % SegmentCount(chunk);
      if (chunks[event.pick % chunks.size()] == chunk && segment >= from) return true;
    }
    return false;
  };
  for (uint32_t m = 0; m < attempt_.micro_steps; ++m) {
    std::vector<Call> contributions;
    for (const int chunk : layout_.chunks_of_rank(rank)) {
      for (int segment = 0; segment < SegmentCount(chunk); ++segment) {
        if (Range(chunk, segment).second != m + 1) continue;
        const Call call = {
            .kind = CallKind::kContribute, .rank = rank, .chunk = chunk, .segment = segment};
        (is_withheld(chunk, segment) ? withheld : contributions).push_back(call);
      }
    }
    if (attempt_.order_seed != 0) random.Shuffle(contributions);
    calls.insert(calls.end(), contributions.begin(), contributions.end());
    calls.push_back({.kind = CallKind::kEndMicroStep, .rank = rank, .micro_step = m});
  }
  const Call seal = {.kind = CallKind::kSeal, .rank = rank};
  calls.push_back(seal);
  if (!withheld.empty()) {
    calls.insert(calls.end(), withheld.begin(), withheld.end());
    calls.push_back(seal);
  }
  return calls;
}

std::vector<Call> Script::Calls() const {
  std::vector<std::vector<Call>> by_rank;
  size_t left = 0;
  for (int rank = 0; rank < job_.world_size; ++rank) {
    by_rank.push_back(CallsOf(rank));
    left += by_rank.back().size();
  }
  std::vector<size_t> next(by_rank.size(), 0);
  std::vector<Call> calls;
  Random random(attempt_.order_seed);
  int rank = 0;
  for (; left > 0; --left) {
    if (attempt_.order_seed != 0) rank = random.Below(job_.world_size);
    while (next[rank] == by_rank[rank].size()) rank = (rank + 1) % job_.world_size;
    calls.push_back(by_rank[rank][next[rank]++]);
  }
  return calls;
}

StepSettings Script::Settings() const {
  return {.scale = attempt_.scale,
          .overrides = attempt_.overrides,
          .trainer_state = TrainerState(attempt_),
          .expected_clipping = attempt_.expects_clipping ? attempt_.vote.clipping : Clipping()};
}

bool Script::IsSpoiltWithPadding(int chunk) const {
  if (attempt_.spoil != Spoil::kPadding) return false;
  return layout_.padding().front().chunk == chunk;
}

bool Script::IsEmpty(int chunk, int segment) const {
  if (attempt_.spoil == Spoil::kSentEmpty && layout_.ChunksOfParameter(spoiled_).front() == chunk) {
    return true;
  }
  if (IsSpoiltWithPadding(chunk)) return false;
  const auto [begin, end] = Range(chunk, segment);
  for (const ChunkPiece& piece : layout_.Pieces(chunk)) {
    if (IsUsed(job_, attempt_, job_.parameters[piece.parameter].id, begin, end)) return false;
  }
  // Where there is no gradient, zeros may be sent just as well.
  return Mix(Mix(attempt_.gradient_seed + chunk) + segment) % 2 == 0;
}

const std::vector<std::byte>& Script::Payload(int chunk, int segment) {
  auto [found, made] = payloads_.try_emplace({chunk, segment});
  std::vector<std::byte>& bytes = found->second;
  if (!made || IsEmpty(chunk, segment)) return bytes;
  const Chunk& place = layout_.chunks()[chunk];
  const DType dtype = job_.groups[place.group].wire_dtype;
  bytes.resize(place.elements * SizeBytes(dtype));
  for (const ChunkPiece& piece : layout_.Pieces(chunk)) {
    auto [gradient, is_new] = gradients_.try_emplace({piece.parameter, segment});
    if (is_new) {
      gradient->second = GradientOf(job_, attempt_, job_.parameters[piece.parameter], segment);
    }
    for (int64_t i = 0; i < piece.elements; ++i) {
      StoreElement(bytes.data(), dtype, piece.chunk_offset + i,
                   gradient->second[piece.parameter_offset + i]);
    }
  }
  if (IsSpoiltWithPadding(chunk)) {
    const ChunkPiece& padding = layout_.padding().front();
    StoreElement(bytes.data(), dtype, padding.chunk_offset + padding.elements - 1, 1.0f);
  }
  return bytes;
}

std::optional<float> Script::Found(const Poison& poison, const ParameterPlan& parameter,
                                   uint32_t micro_step) const {
  if (!poison.told || parameter.id != poison.parameter) return std::nullopt;
  if (poison.element >= parameter.elements) return std::nullopt;
  const std::vector<uint32_t>& ends = attempt_.segments[parameter.group];
  if (poison.segment >= static_cast<int>(ends.size())) return std::nullopt;
  const uint32_t begin = poison.segment == 0 ? 0 : ends[poison.segment - 1];
  if (micro_step < begin || micro_step >= ends[poison.segment]) return std::nullopt;
  const float value = GradientOf(job_, attempt_, parameter, poison.segment)[poison.element];
  if (std::isfinite(value)) return std::nullopt;
  return value;
}

UsedParameters Script::Used(int rank, uint32_t micro_step) const {
  UsedParameters used = {.all = false};
  bool all = true;
  for (int p = 0; p < static_cast<int>(job_.parameters.size()); ++p) {
    const ParameterPlan& parameter = job_.parameters[p];
    if (!parameter.trainable) continue;
    const auto found = attempt_.used.find(parameter.id);
    const bool undeclared = p == spoiled_ && attempt_.spoil == Spoil::kUndeclared;
    const bool here =
        found != attempt_.used.end() && !undeclared && (found->second[micro_step] >> rank & 1) != 0;
    all = all && here;
    if (!here) continue;
    used.parameters.push_back(p);
    for (const Poison& poison : attempt_.poisons) {
      if (const std::optional<float> value = Found(poison, parameter, micro_step)) {
        used.non_finite = {.parameter = p, .element = poison.element, .value = *value};
      }
    }
  }
  if (all && attempt_.gradient_seed % 2 == 0) {
    used.all = true;
    used.parameters.clear();
  }
  return used;
}

}  // namespace ballast::histories
