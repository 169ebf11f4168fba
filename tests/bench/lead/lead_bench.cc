#include "tests/bench/lead/lead_bench.h"

#include <ctime>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/layout.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/job/members/words.h"
#include "cpu_optimizer_service/job/members/words_codec.h"
#include "cpu_optimizer_service/job/step/step_decision.h"
#include "cpu_optimizer_service/job/step/step_lead.h"

namespace ballast::bench {
namespace {

constexpr int64_t kBlock = 256;

JobSpec SpecOf(const LeadCase& measured) {
  JobSpec spec = {.name = "made", .groups = {{.name = "decay"}, {.name = "no_decay"}}};
  spec.layout.world_size = measured.members;
  spec.layout.group_count = 2;
  spec.layout.mesh = {{"shards", measured.members}};
  for (int p = 0; p < measured.parameters; ++p) {
    spec.layout.parameters.push_back({.name = absl::StrCat("layers.", p, ".weight"),
                                      .shape = {measured.members, kBlock},
                                      .group = p % 2,
                                      .placements = {{0}}});
  }
  for (int member = 0; member < measured.members; ++member) {
    spec.members.push_back({.address = absl::StrCat("host", member, ":7070")});
    spec.homes.push_back(member);
  }
  return spec;
}

StepReport ReportOf(const LeadCase& measured, int member) {
  StepReport report = {.micro_steps = measured.micro_steps,
                       .sums = {.groups = std::vector<ExactSum>(2)},
                       .uses = StepUses(measured.parameters)};
  for (ExactSum& sum : report.sums.groups) sum.Add(1e-6 * (member + 1));
  for (uint32_t m = 0; m < measured.micro_steps; ++m) (void)report.uses.Add(m, {.all = true});
  // Two members have halves of a block.
  for (int i = 0; i < measured.cut_blocks; ++i) {
    report.sums.cut.push_back({.parameter = i % measured.parameters,
                               .begin = (member / 2) * kBlock + (member % 2) * kBlock / 2,
                               .values = std::vector<float>(kBlock / 2, 0.001f)});
  }
  return report;
}

double ThreadSeconds() {
  timespec now = {};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// A member's words of a step, as they come.
std::vector<std::string> WordsOf(const LeadCase& measured, int member, uint64_t step) {
  MemberWord::Standing stands = {.generation = 1, .committed_step = step - 1, .has_weights = true};
  const MemberWord committed = {stands};
  stands.settings = StepSettings();
  return {Encode(committed), Encode(MemberWord{stands}),
          Encode(MemberWord{MemberWord::Report{
              .number = step, .report = ReportOf(measured, member), .vote = StepVote()}})};
}

class Lead {
 public:
  explicit Lead(const JobSpec& spec, Layout layout)
      : spec_(spec),
        layout_(std::move(layout)),
        lead_(spec_, layout_, spec_.homes),
        update_counts_(spec_.layout.parameters.size(), 0) {}

  // Returns the bytes that go out.
  absl::StatusOr<int64_t> Step(uint64_t step, const std::vector<std::vector<std::string>>& words) {
    lead_.Begin(step);
    std::vector<ToMember> told;
    // Of all members the first words, then the next ones.
    for (size_t i = 0; i < words[0].size(); ++i) {
      for (int member = 0; member < static_cast<int>(words.size()); ++member) {
        BALLAST_ASSIGN_OR_RETURN(MemberWord word, DecodeMemberWord(words[member][i], spec_));
        if (auto* stands = std::get_if<MemberWord::Standing>(&word.what)) {
          lead_.Stand(member, stands->attempt, stands->by, stands->settings, told);
        } else if (auto* report = std::get_if<MemberWord::Report>(&word.what)) {
          lead_.Report(member, report->attempt, std::move(report->report), std::move(report->vote),
                       told);
        }
      }
    }
    if (!lead_.is_ready()) return absl::InternalError("the step cannot be decided");
    StepTerms terms = {.step = step, .settings = {}, .hyper_parameters = {}};
    for (const GroupSpec& group : spec_.groups) {
      terms.hyper_parameters.push_back(group.hyper_parameters);
    }
    const Draft draft = DecideStep({.spec = spec_,
                                    .layout = layout_,
                                    .terms = terms,
                                    .attempt = 0,
                                    .summary = *lead_.summary(),
                                    .update_counts = update_counts_},
                                   lead_.vote());
    update_counts_ = draft.update.update_counts;
    const KeptDecision decision = {.outcome = draft.outcome,
                                   .terms = terms,
                                   .vote = lead_.vote(),
                                   .micro_steps = lead_.summary()->micro_steps,
                                   .hyper_parameters = draft.update.hyper_parameters,
                                   .update_counts = draft.update.update_counts,
                                   .values_after = terms.hyper_parameters,
                                   .group_norms = lead_.summary()->group_sums,
                                   .reports = std::vector<uint64_t>(words.size(), step)};
    int64_t bytes = 0;
    for (size_t member = 0; member < words.size(); ++member) {
      bytes += static_cast<int64_t>(
          Encode(LeadWord{LeadWord::Decided{.report = step, .decision = decision}}).size());
    }
    return bytes;
  }

 private:
  const JobSpec spec_;
  const Layout layout_;
  StepLead lead_;
  std::vector<int64_t> update_counts_;
};

}  // namespace

absl::StatusOr<Figures> MeasureLead(const LeadCase& measured, int steps) {
  if (measured.members < 2 || measured.members % 2 != 0 || measured.parameters < 1) {
    return absl::InvalidArgumentError("--members is even and at least 2, --parameters at least 1");
  }
  const JobSpec spec = SpecOf(measured);
  BALLAST_ASSIGN_OR_RETURN(Layout layout, Layout::CreateForRanks(spec.layout, spec.RanksOf(0)));
  Lead lead(spec, std::move(layout));
  std::vector<double> seconds;
  std::vector<double> in;
  std::vector<double> out;
  for (int step = 1; step <= steps; ++step) {
    std::vector<std::vector<std::string>> words;
    int64_t bytes = 0;
    for (int member = 0; member < measured.members; ++member) {
      words.push_back(WordsOf(measured, member, step));
      for (const std::string& each : words.back()) bytes += static_cast<int64_t>(each.size());
    }
    const double before = ThreadSeconds();
    BALLAST_ASSIGN_OR_RETURN(const int64_t sent, lead.Step(step, words));
    seconds.push_back(ThreadSeconds() - before);
    in.push_back(static_cast<double>(bytes));
    out.push_back(static_cast<double>(sent));
  }
  Figures figures("lead");
  figures.Add("step_seconds", seconds, "s");
  figures.Add("bytes_in", in, "B");
  figures.Add("bytes_out", out, "B");
  figures.info()["members"] = measured.members;
  figures.info()["parameters"] = measured.parameters;
  figures.info()["cut_blocks"] = measured.cut_blocks;
  return figures;
}

}  // namespace ballast::bench
