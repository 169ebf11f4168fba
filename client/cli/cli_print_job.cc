// The output of `ballast job`: the job, the step in progress rank by rank, the last decisions.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/cli/cli_print.h"
#include "client/cli/cli_text.h"
#include "cpu_optimizer_service/common/text/activity.h"
#include "cpu_optimizer_service/common/text/printable.h"
#include "proto/convert.h"

namespace ballast::client::cli {
namespace {

constexpr int kDecisionsShown = 16;
constexpr size_t kRanksNamed = 8;

std::vector<std::string> Strings(const google::protobuf::RepeatedPtrField<std::string>& values) {
  return {values.begin(), values.end()};
}

std::string YesNo(bool value) { return value ? "yes" : "no"; }

// "rank 1", "ranks 0, 1, 2", "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 56 more".
std::string RanksNamed(const std::vector<int32_t>& ranks) {
  const size_t named = std::min(ranks.size(), kRanksNamed);
  std::string text = absl::StrCat(ranks.size() == 1 ? "rank " : "ranks ",
                                  absl::StrJoin(ranks.begin(), ranks.begin() + named, ", "));
  if (named < ranks.size()) absl::StrAppend(&text, " and ", ranks.size() - named, " more");
  return text;
}

// The phase, and what the step in progress waits for.
std::string PhaseText(const v1::Job& job) {
  const std::string step = absl::StrCat("step ", job.committed_step() + 1);
  // Ranks that have not begun the step have not sealed it either, so they are among them.
  std::vector<int32_t> unsealed;
  for (const v1::RankProgress& rank : job.ranks()) {
    if (!rank.sealed()) unsealed.push_back(rank.rank());
  }
  std::string more;
  if (job.phase() == v1::AWAITING_WEIGHTS) more = "first weights are being uploaded";
  if (job.phase() == v1::CREATING) more = "its memory is being made";
  if (job.phase() == v1::READY) more = "between steps";
  if (job.phase() == v1::OPEN) more = absl::StrCat(step, " waits for ", RanksNamed(unsealed));
  if (job.phase() == v1::SEALED) {
    // A save without memory for second versions holds back the decision until it ends.
    const auto waits_for = absl::c_find_if(
        job.saves(), [](const v1::SaveProgress& save) { return save.holds_back_decisions(); });
    more = waits_for == job.saves().end()
               ? absl::StrCat(step, " is being decided")
               : absl::StrCat(step, " waits for the save to ", waits_for->directory());
  }
  if (job.phase() == v1::VOTING) {
    std::vector<int32_t> unvoted;
    for (const v1::RankProgress& rank : job.ranks()) {
      if (!rank.voted()) unvoted.push_back(rank.rank());
    }
    more = absl::StrCat(step, " waits for the vote of ", RanksNamed(unvoted));
  }
  if (!job.waits_for().empty()) {
    more = absl::StrCat(job.phase() == v1::CREATING ? "it" : step, " waits: ", job.waits_for());
  }
  if (job.phase() == v1::UPDATING) more = absl::StrCat("chunks are moving to ", step);
  if (job.phase() == v1::DIRECTIONS) {
    std::vector<int32_t> awaited;
    for (const v1::RankProgress& rank : job.ranks()) {
      if (rank.orthogonalizes()) awaited.push_back(rank.rank());
    }
    more = absl::StrCat("step ", job.committed_step(), " waits for what ", RanksNamed(awaited),
                        " makes of the directions");
  }
  if (job.phase() == v1::BROKEN) more = job.problem();
  return absl::StrCat(Name(job.phase()), more.empty() ? "" : "; ", more);
}

std::string SavedText(const v1::Job& job) {
  if (!job.has_found_checkpoint()) return "no checkpoint of this name in the service's directory";
  const v1::SavedCheckpoint& found = job.found_checkpoint();
  return absl::StrCat("step ", FormatCount(found.step()), " in ", found.directory());
}

std::string UpdateText(const v1::Job& job) {
  const v1::Speculation& speculation = job.speculation();
  if (!speculation.unavailable().empty()) {
    return absl::StrCat("wait, though asked to speculate: ", speculation.unavailable());
  }
  if (job.update_mode() != v1::SPECULATE) return Name(job.update_mode());
  return absl::StrCat(Name(job.update_mode()),
                      "; speculated chunks: ", FormatCount(speculation.speculated_chunks()), " (",
                      FormatCount(speculation.published_chunks()), " published, ",
                      FormatCount(speculation.redone_chunks()),
                      " redone), paused now: ", FormatCount(speculation.paused_chunks()));
}

std::string UndoText(const v1::Job& job) {
  if (job.undoable_step() == 0) return "nothing to undo";
  return absl::StrCat("step ", FormatCount(job.undoable_step()), " can be undone");
}

std::string MemoryText(const v1::MemoryUse& memory) {
  std::vector<std::string> parts = {
      absl::StrCat("state ", FormatBytes(memory.state_bytes())),
      absl::StrCat("gradients ", FormatBytes(memory.gradient_bytes())),
      absl::StrCat("accumulators ", FormatBytes(memory.accumulator_bytes()))};
  if (memory.speculation_bytes() > 0) {
    parts.push_back(absl::StrCat("second versions ", FormatBytes(memory.speculation_bytes())));
  }
  if (memory.previous_bytes() > 0) {
    parts.push_back(absl::StrCat("previous versions ", FormatBytes(memory.previous_bytes())));
  }
  parts.push_back(absl::StrCat("other ", FormatBytes(OtherBytes(memory))));
  return FormatNames(absl::StrCat("memory        ", FormatBytes(memory.total_bytes())), parts);
}

// Memory shared with workers on the service's host, for their gradients and weights. It is not part
// of the job's total.
std::string SharedMemoryText(const v1::Job& job) {
  std::vector<int32_t> ranks;
  for (const v1::RankProgress& rank : job.ranks()) {
    if (rank.shared_memory()) ranks.push_back(rank.rank());
  }
  if (ranks.empty()) return "";
  return FormatField("shared", absl::StrCat(FormatBytes(job.memory().shared_bytes()), " with ",
                                            RanksNamed(ranks), ", in addition"));
}

// Saves that are under way, and what steps wait for. Why one gets no further is not known.
std::string SavesText(const v1::Job& job) {
  constexpr double kLongSeconds = 10;
  std::string text;
  for (const v1::SaveProgress& save : job.saves()) {
    std::string line =
        absl::StrCat("step ", FormatCount(save.step()), " to ", save.directory(), " for ",
                     FormatNumber(std::round(save.seconds())), " s, ",
                     FormatBytes(save.written_bytes()), " of ", FormatBytes(save.size_bytes()));
    if (save.seconds_since_progress() > kLongSeconds) {
      absl::StrAppend(&line, "; ",
                      save.makes_memory() ? "no memory was made" : "nothing was written", " for ",
                      FormatNumber(std::round(save.seconds_since_progress())), " s");
    }
    if (save.makes_memory()) {
      absl::StrAppend(&line, "; steps wait until there is memory for second versions");
    } else if (save.holds_back_decisions()) {
      absl::StrAppend(&line, "; steps wait for it, because there is no memory for second versions");
    }
    text += FormatField("saving", line);
  }
  return text;
}

// Long work that is under way, a line each.
std::string ActivitiesText(const v1::Job& job) {
  std::string text;
  for (const v1::Activity& activity : job.activities()) {
    text += FormatField("at work", ToLine(proto::FromProto(activity)));
  }
  return text;
}

std::string LinkText(const v1::JobMember& member) {
  // Only the lead has links to all.
  if (!member.linked() && member.problem().empty()) return "-";
  if (!member.linked() && member.seconds_without_link() > 0) {
    return absl::StrCat("none for ", std::lround(member.seconds_without_link()),
                        " s: ", member.problem());
  }
  return absl::StrCat(member.linked() ? "yes" : "-", member.problem().empty() ? "" : "; ",
                      member.problem());
}

// Empty for a job on one service.
std::string MembersText(const v1::Job& job) {
  if (job.members().empty()) return "";
  std::vector<std::vector<int>> ranks(job.members_size());
  for (int rank = 0; rank < job.homes_size(); ++rank) {
    const int home = job.homes(rank);
    if (home >= 0 && home < job.members_size()) ranks[home].push_back(rank);
  }
  Table table({{"member"},
               {"ranks"},
               {"lead"},
               {"memory", kRight},
               {"waited for"},
               {"round trip", kRight},
               {"link"}});
  for (int member = 0; member < job.members_size(); ++member) {
    const bool leads = !job.homes().empty() && job.homes(0) == member;
    const v1::JobMember& shown = job.members(member);
    table.Add({shown.address(), RankRanges(ranks[member]), leads ? "yes" : "",
               shown.memory_bytes() > 0 ? FormatBytes(shown.memory_bytes()) : "-",
               shown.waited_for() ? "yes" : "",
               shown.round_trip_seconds() > 0
                   ? absl::StrFormat("%.2f ms", shown.round_trip_seconds() * 1e3)
                   : "-",
               LinkText(shown)});
  }
  return absl::StrCat(table.ToString(), "\n");
}

// What each rank has sent. "furthest" is the largest number of micro-steps that any chunk of the
// rank has, or the sealed number.
std::string RanksText(const v1::Job& job) {
  Table table({{"rank", kRight},
               {"process"},
               {"begun"},
               {"micro-steps", kRight},
               {"furthest", kRight},
               {"chunks there", kRight},
               {"sealed"}});
  std::string behind;
  uint32_t attempt = 0;  // Those before it can no longer be decided.
  for (const v1::RankProgress& rank : job.ranks()) attempt = std::max(attempt, rank.attempt());
  for (const v1::RankProgress& rank : job.ranks()) {
    const auto in_step = [&](uint32_t count) {
      return rank.begun() ? absl::StrCat(count) : std::string("-");
    };
    table.Add({absl::StrCat(rank.rank()),
               rank.attached() ? absl::StrCat(rank.process_id(), rank.left() ? " (left)" : "")
                               : "not attached",
               YesNo(rank.begun()), in_step(rank.micro_steps_ended()),
               in_step(rank.furthest_micro_step()),
               absl::StrCat(rank.begun() ? rank.chunks_complete() : 0, "/", rank.chunks()),
               rank.voted() ? "and voted" : YesNo(rank.sealed())});
    if (rank.attempt() < attempt) {
      absl::StrAppend(&behind, "rank ", rank.rank(), " is in attempt ", rank.attempt(),
                      ", which another rank has discarded; attempt ", attempt, " is the newest\n");
    }
    if (rank.missing_parameters().empty()) continue;
    absl::StrAppend(&behind, FormatNames(absl::StrCat("rank ", rank.rank(), " is behind with"),
                                         Strings(rank.missing_parameters())));
  }
  return absl::StrCat(table.ToString(), behind);
}

// One value if the groups have the same, otherwise the least and the greatest.
std::string ValuesText(const std::vector<double>& by_group) {
  if (by_group.empty()) return "-";
  const auto [least, most] = std::minmax_element(by_group.begin(), by_group.end());
  if (*least == *most) return FormatNumber(*least);
  return absl::StrCat(FormatNumber(*least), " to ", FormatNumber(*most));
}

std::string RatesText(const v1::StepRecord& step) {
  std::vector<double> rates;
  for (const v1::HyperParameters& values : step.hyper_parameters()) rates.push_back(values.lr());
  return ValuesText(rates);
}

// What the ranks voted beyond "apply it": empty if nothing.
std::string VoteText(const v1::StepRecord& step) {
  if (step.abandoned()) return "to abandon it";
  const v1::Clipping& voted = step.voted();
  if (voted.max_norm() > 0) return absl::StrCat("a norm of ", FormatNumber(voted.max_norm()));
  if (voted.multipliers().empty()) return "";
  return absl::StrCat("multipliers of ",
                      ValuesText({voted.multipliers().begin(), voted.multipliers().end()}));
}

// One line for a run of steps for which the same was voted, from index `first` on.
std::string VotesText(const v1::Job& job, int first) {
  std::string text;
  // The run of steps from i on ends before `next`.
  for (int i = first, next; i < job.recent_steps_size(); i = next) {
    const std::string vote = VoteText(job.recent_steps(i));
    next = i + 1;
    while (next < job.recent_steps_size() && VoteText(job.recent_steps(next)) == vote) ++next;
    if (vote.empty()) continue;
    const uint64_t from = job.recent_steps(i).step();
    absl::StrAppend(&text, next == i + 1 ? "step " : "steps ", from);
    if (next > i + 1) absl::StrAppend(&text, "-", job.recent_steps(next - 1).step());
    absl::StrAppend(&text, ": the ranks voted ", vote, "\n");
  }
  return text;
}

// The parameters without a gradient in the recorded steps from index `first` on: one line for a run
// of steps that lacked the same ones.
std::string UnusedText(const v1::Job& job, int first) {
  std::string text;
  for (int i = first, next; i < job.recent_steps_size(); i = next) {
    const auto& names = job.recent_steps(i).unused_parameters();
    next = i + 1;
    while (next < job.recent_steps_size() &&
           absl::c_equal(job.recent_steps(next).unused_parameters(), names)) {
      ++next;
    }
    if (names.empty()) continue;
    const uint64_t from = job.recent_steps(i).step();
    const std::string steps =
        next == i + 1 ? absl::StrCat("step ", from)
                      : absl::StrCat("steps ", from, "-", job.recent_steps(next - 1).step());
    absl::StrAppend(&text,
                    FormatNames(absl::StrCat(steps, " had no gradient for"), Strings(names)));
  }
  return text;
}

std::string StepsText(const v1::Job& job) {
  Table table({{"step", kRight},
               {"decision"},
               {"norm", kRight},
               {"clip", kRight},
               {"mult.", kRight},
               {"micro", kRight},
               {"scale", kRight},
               {"spec.", kRight},
               {"redo", kRight},
               {"lr"}});
  std::string skips;
  const int first = std::max(0, job.recent_steps_size() - kDecisionsShown);
  for (int i = first; i < job.recent_steps_size(); ++i) {
    const v1::StepRecord& step = job.recent_steps(i);
    table.Add({absl::StrCat(step.step()), step.applied() ? "applied" : "skipped",
               FormatNumber(step.norm()), FormatNumber(step.clip_coefficient()),
               ValuesText({step.multipliers().begin(), step.multipliers().end()}),
               absl::StrCat(step.micro_steps()), FormatNumber(step.loss_scale()),
               FormatCount(step.speculated_chunks()), FormatCount(step.redone_chunks()),
               RatesText(step)});
    if (!step.applied()) {
      absl::StrAppend(&skips, "step ", step.step(), " was skipped: ", Printable(step.skip_reason()),
                      "\n");
    }
    if (!step.left().empty()) {
      absl::StrAppend(&skips, "step ", step.step(), ": ", Printable(step.left()), "\n");
    }
  }
  const std::string older =
      first == 0 ? "" : absl::StrCat("the last ", kDecisionsShown, " decisions; --json has more\n");
  return absl::StrCat(older, table.ToString(), VotesText(job, first), skips,
                      UnusedText(job, first));
}

std::string CoverageText(const v1::Job& job) {
  std::string text =
      absl::StrCat("complete in ", FormatCount(job.coverage_complete_steps()), " of ",
                   FormatCount(job.applied_steps() + job.skipped_steps()), " decided steps");
  if (job.not_kept_steps() > 0) {
    absl::StrAppend(&text, "; ", FormatCount(job.not_kept_steps()), " could not be kept");
  }
  return text;
}

}  // namespace

std::string StepHistoryText(const v1::Job& job) {
  if (job.recent_steps().empty()) return "no step has been decided yet\n";
  Table table({{"step", kRight},
               {"norm", kRight},
               {"clip", kRight},
               {"lr"},
               {"seconds", kRight},
               {"skipped because"}});
  for (const v1::StepRecord& step : job.recent_steps()) {
    table.Add({absl::StrCat(step.step()), FormatNumber(step.norm()),
               FormatNumber(step.clip_coefficient()), RatesText(step),
               step.seconds() > 0 ? FormatNumber(step.seconds()) : "-",
               step.applied() ? "" : step.skip_reason()});
  }
  return table.ToString();
}

std::string JobText(const v1::Job& job) {
  if (job.phase() == v1::CREATING) {
    return absl::StrCat(FormatField("job", proto::BareName(job.name())),
                        FormatField("uid", job.uid()), FormatField("phase", PhaseText(job)),
                        ActivitiesText(job));
  }
  std::string text = absl::StrCat(
      FormatField("job", proto::BareName(job.name())), FormatField("uid", job.uid()),
      FormatField("phase", PhaseText(job)),
      job.phase() == v1::BROKEN ? FormatField("saved", SavedText(job)) : "",
      FormatField("step", absl::StrCat(FormatCount(job.committed_step()), " committed (",
                                       FormatCount(job.applied_steps()), " applied, ",
                                       FormatCount(job.skipped_steps()), " skipped)")),
      FormatField("coverage", CoverageText(job)));
  absl::StrAppend(
      &text, FormatField("generation", ToString(proto::FromProto(job.generation()))),
      FormatField("update", UpdateText(job)), MemoryText(job.memory()), SharedMemoryText(job),
      SavesText(job), ActivitiesText(job), FormatField("unused", Name(job.unused_policy())),
      FormatField("on abort", job.on_abort() == v1::SKIP_STEP ? "skip" : "redo"),
      job.newton_schulz() == v1::BY_WORKERS ? FormatField("Newton-Schulz", "by workers") : "",
      job.keep_previous() ? FormatField("undo", UndoText(job)) : "", "\n", MembersText(job),
      RanksText(job), "\n");
  absl::StrAppend(&text,
                  job.recent_steps().empty() ? "no step has been decided yet\n" : StepsText(job));
  return text;
}

}  // namespace ballast::client::cli
