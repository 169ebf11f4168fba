// Histories as text.
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cpu_optimizer_service/common/rule.h"
#include "tests/histories/history.h"

namespace ballast::histories {
namespace {

const char* Name(EventKind kind) {
  static constexpr const char* kNames[] = {
      "makes a call twice",
      "loses its stream and opens it again",
      "loses its stream after its seal, and is away until the commit",
      "is late: its messages come when the others have sealed",
      "withholds part of a chunk until its seal is refused",
      "sends a contribution that skips a micro-step",
      "sends a contribution that covers an old micro-step and a new one",
      "sends a contribution to another rank's chunk",
      "sends a contribution that is a byte short",
      "sends a contribution to another step",
      "seals early",
      "seals, then seals another number, then seals again",
      "begins with another loss scale first",
      "(an operator) changes a group",
      "(a reader) takes a snapshot",
      "(a reader) reads weights",
      "(an operator) saves",
      "(the service) tells who is awaited",
      "is spoken for by a stream of an older generation",
      "takes back what it gave and tries again",
      "votes before the norm is known",
      "votes what can never be",
      "votes otherwise than the others, at first",
      "(its home's link) is cut",
      "(the service) is about to die",
  };
  return kNames[static_cast<int>(kind)];
}

const char* Name(End end) {
  switch (end) {
    case End::kCommit:
      return "commit";
    case End::kAbort:
      return "abort-step";
    case End::kAbortAtDecision:
      return "abort-step just after the last seal";
    case End::kReplace:
      return "another process takes a rank";
    case End::kRestart:
      return "a rank's stream ends and another process takes the rank";
    case End::kLoad:
      return "the last save is loaded";
    case End::kUndo:
      return "abort-step, and undo of the step before";
  }
  return "?";
}

const char* Name(Layer layer) {
  return layer == Layer::kEngine    ? "engine"
         : layer == Layer::kSession ? "through client sessions"
                                    : "through client sessions, over members";
}

const char* Name(Spoil spoil) {
  switch (spoil) {
    case Spoil::kNone:
      return "nothing";
    case Spoil::kPadding:
      return "a gradient in the padding";
    case Spoil::kUndeclared:
      return "a gradient of a parameter declared unused";
    case Spoil::kSentEmpty:
      return "a used parameter sent as empty";
  }
  return "?";
}

const char* Name(UnusedPolicy policy) {
  return policy == UnusedPolicy::kError ? "error" : policy == UnusedPolicy::kSkip ? "skip" : "zero";
}

std::string Text(const HyperParameterOverrides& changes) {
  std::string text;
  ForEachHyperParameter(
      [&](const char* name, const auto& value) {
        if (value.has_value()) absl::StrAppend(&text, text.empty() ? "" : " ", name, "=", *value);
      },
      changes);
  return text.empty() ? "nothing" : text;
}

absl::string_view Text(ShardingPlan sharding) {
  switch (sharding) {
    case ShardingPlan::kBuckets:
      return "buckets";
    case ShardingPlan::kRows:
      return "rows";
    case ShardingPlan::kColumns:
      return "columns";
    case ShardingPlan::kReplicas:
      return "replicas of rows";
    case ShardingPlan::kRowsAndColumns:
      return "rows and columns";
  }
  return "unknown";
}

std::string Text(const JobPlan& job) {
  std::string text = absl::StrCat(
      "job: ", job.world_size, " ranks, ", job.threads, " threads, ", Text(job.sharding),
      job.sharding == ShardingPlan::kBuckets ? absl::StrCat(" of ", job.bucket_elements) : "",
      ", chunks of ", job.chunk_elements, ", on abort ",
      job.on_abort == OnAbort::kSkip ? "skip" : "redo",
      job.keep_previous ? ", keeps the previous version" : "", ", unused ", Name(job.unused_policy),
      ", max_micro_steps ", job.max_micro_steps, ", ",
      job.update_mode == UpdateMode::kSpeculate ? "speculate" : "wait",
      job.newton_schulz == Orthogonalizer::kWorkers ? ", workers orthogonalize" : "", "\n");
  if (job.members > 0) {
    const std::vector<int> homes(job.homes.begin(), job.homes.begin() + job.world_size);
    absl::StrAppend(&text, "  ", job.members, " members, homes [", absl::StrJoin(homes, " "),
                    "], the home of rank ", job.victim, " may die, words in order ", job.links_seed,
                    "\n");
  }
  for (size_t group = 0; group < job.groups.size(); ++group) {
    absl::StrAppend(&text, "  group ", group, ": ", Name(job.groups[group].wire_dtype), " up, ",
                    Name(job.groups[group].return_dtype), " down, state ",
                    Name(job.groups[group].state.format), ", ",
                    ToString(job.groups[group].hyper_parameters), "\n");
  }
  for (const ParameterPlan& parameter : job.parameters) {
    absl::StrAppend(&text, "  parameter ", NameOf(parameter), ": ", parameter.elements,
                    " elements, group ", parameter.group, parameter.trainable ? "" : ", frozen",
                    "\n");
  }
  return text;
}

std::string Text(const Attempt& attempt) {
  std::string text =
      absl::StrCat(attempt.micro_steps, " micro-steps, loss scale ", attempt.scale.loss_scale,
                   ", divisors [", absl::StrJoin(attempt.scale.divisors, " "), "], gradients of ",
                   attempt.gradient_size, ", order ", attempt.order_seed, "\n");
  for (size_t group = 0; group < attempt.segments.size(); ++group) {
    absl::StrAppend(&text, "  group ", group, " sends at the ends of micro-steps ",
                    absl::StrJoin(attempt.segments[group], " "), "\n");
  }
  for (const auto& [group, changes] : attempt.overrides) {
    absl::StrAppend(&text, "  overrides of group ", group, ": ", Text(changes), "\n");
  }
  absl::StrAppend(&text, "  vote: ", attempt.vote.apply ? "apply" : "abandon", ", max_norm ",
                  attempt.vote.clipping.max_norm, ", multipliers [",
                  absl::StrJoin(attempt.vote.clipping.multipliers, " "), "]",
                  attempt.vote.trainer_state.has_value() ? ", a trainer's state" : "",
                  attempt.expects_clipping ? "" : ", not expected", "; ranks that look 0x",
                  absl::Hex(attempt.looks), ", and discard then ", attempt.spikes, " times",
                  attempt.may_guess ? "; may guess" : "", "\n");
  for (const auto& [group, changes] : attempt.vote.overrides) {
    absl::StrAppend(&text, "  voted of group ", group, ": ", Text(changes), "\n");
  }
  if (attempt.derive_seed != 0) {
    absl::StrAppend(&text, "  the job is derived before it, of seed ", attempt.derive_seed, "\n");
  }
  if (attempt.round_seed != 0) {
    absl::StrAppend(&text, "  O is given with disturbances, of seed ", attempt.round_seed, "\n");
  }
  if (attempt.write_seed != 0) {
    absl::StrAppend(&text, "  state is written before it, of seed ", attempt.write_seed, "\n");
  }
  for (const auto& [id, used] : attempt.used) {
    absl::StrAppend(&text, "  p", absl::Dec(id, absl::kZeroPad3), " used, by micro-step, on ranks ",
                    absl::StrJoin(used, " ",
                                  [](std::string* out, uint32_t ranks) {
                                    absl::StrAppend(out, "0x", absl::Hex(ranks));
                                  }),
                    "\n");
  }
  for (const Poison& poison : attempt.poisons) {
    absl::StrAppend(&text, "  p", absl::Dec(poison.parameter, absl::kZeroPad3), "[", poison.element,
                    "] is ", poison.value, " in contribution ", poison.segment,
                    poison.told ? ", and a worker says so" : "", "\n");
  }
  if (attempt.spoil != Spoil::kNone)
    absl::StrAppend(&text, "  spoilt: ", Name(attempt.spoil), "\n");
  for (const Event& event : attempt.events) {
    absl::StrAppend(&text, "  at ", event.at, "/", kPositions, " rank ", event.rank, " ",
                    Name(event.kind), " (", event.pick, ")",
                    event.kind == EventKind::kOperator ? ": " + Text(event.changes) : "", "\n");
  }
  absl::StrAppend(&text, "  end: ", Name(attempt.end));
  if (attempt.end != End::kCommit) {
    absl::StrAppend(&text, " at ", attempt.end_at, "/", kPositions, ", rank ", attempt.end_rank);
  }
  return text + "\n";
}

}  // namespace

std::string Describe(const History& history) {
  std::string text =
      absl::StrCat("seed ", history.seed, ", ", Name(history.layer), "\n", Text(history.job));
  for (size_t i = 0; i < history.attempts.size(); ++i) {
    absl::StrAppend(&text, "attempt ", i + 1, ": ", Text(history.attempts[i]));
  }
  return text;
}

}  // namespace ballast::histories
