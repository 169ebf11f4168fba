#include "client/cli/cli_print.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/cli/cli_history.h"
#include "proto/convert.h"

namespace ballast::client::cli {
namespace {

using testing::HasSubstr;
using testing::Not;

v1::HyperParameters Rates(double lr) {
  v1::HyperParameters values;
  values.set_lr(lr);
  values.set_beta1(0.9);
  values.set_beta2(0.999);
  values.set_eps(1e-8);
  values.set_weight_decay(0.1);
  values.set_decoupled_weight_decay(true);
  values.set_bias_correction(true);
  return values;
}

// Step 13 is open: rank 0 has two of its nine chunks at micro-step 2, rank 1 is not attached.
v1::Job ExampleJob() {
  v1::Job job;
  job.set_name("jobs/gpt");
  job.set_uid("u-1");
  job.set_phase(v1::OPEN);
  job.set_world_size(2);
  job.set_update_mode(v1::SPECULATE);
  job.set_committed_step(12);
  job.set_applied_steps(11);
  job.set_skipped_steps(1);
  job.set_coverage_complete_steps(12);
  *job.mutable_generation() = proto::ToProto(Generation(2));
  job.mutable_speculation()->set_speculated_chunks(1200);
  job.mutable_speculation()->set_published_chunks(1100);
  job.mutable_speculation()->set_redone_chunks(90);
  job.mutable_speculation()->set_paused_chunks(3);
  job.mutable_memory()->set_total_bytes(5 << 20);
  job.mutable_memory()->set_state_bytes(1 << 20);
  job.mutable_memory()->set_accumulator_bytes(1 << 20);
  job.mutable_memory()->set_speculation_bytes(2 << 20);
  job.mutable_memory()->set_shared_bytes(3 << 20);
  job.add_groups()->set_name("jobs/gpt/groups/decay");
  job.add_groups()->set_name("jobs/gpt/groups/no_decay");
  v1::RankProgress* rank = job.add_ranks();
  rank->set_attached(true);
  rank->set_process_id("host:1:ff");
  rank->set_begun(true);
  rank->set_micro_steps_ended(1);
  rank->set_chunks(9);
  rank->set_chunks_complete(4);
  rank->set_furthest_micro_step(2);
  rank->set_shared_memory(true);
  rank->add_missing_parameters("wte");
  rank->add_missing_parameters("h.0.b");
  job.add_ranks()->set_rank(1);
  v1::StepRecord* skipped = job.add_recent_steps();
  skipped->set_step(11);
  skipped->set_norm(std::numeric_limits<double>::quiet_NaN());
  skipped->set_loss_scale(65536);
  skipped->set_skip_reason("wte has a NaN");
  v1::StepRecord* applied = job.add_recent_steps();
  applied->set_step(12);
  applied->set_applied(true);
  applied->set_norm(2);
  applied->set_clip_coefficient(0.5);
  for (int group = 0; group < 2; ++group) applied->add_multipliers(0.25);
  applied->mutable_voted()->set_max_norm(1);
  applied->set_micro_steps(4);
  applied->set_loss_scale(1);
  applied->set_speculated_chunks(18);
  applied->set_published_chunks(11);
  applied->set_redone_chunks(7);
  applied->add_unused_parameters("head.b");
  *applied->add_hyper_parameters() = Rates(0.001);
  *applied->add_hyper_parameters() = Rates(0.002);
  return job;
}

size_t WidestLine(const std::string& text) {
  size_t widest = 0;
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    widest = std::max(widest, line.size());
  }
  return widest;
}

TEST(JobText, ShowsRanksAndDecisions) {
  const std::string text = JobText(ExampleJob());
  EXPECT_THAT(text, HasSubstr("job           gpt\n"));
  EXPECT_THAT(text, HasSubstr("12 committed (11 applied, 1 skipped)"));
  EXPECT_THAT(text, HasSubstr("coverage      complete in 12 of 12 decided steps\n"));
  v1::Job with_lost = ExampleJob();
  with_lost.set_coverage_complete_steps(10);
  with_lost.set_not_kept_steps(2);
  EXPECT_THAT(JobText(with_lost),
              HasSubstr("complete in 10 of 12 decided steps; 2 could not be kept\n"));
  EXPECT_THAT(text, HasSubstr("memory        5.00 MiB: state 1.00 MiB, gradients 0 B, accumulators "
                              "1.00 MiB,\n    second versions 2.00 MiB, other 1.00 MiB\n"
                              "shared        3.00 MiB with rank 0, in addition\n"));
  EXPECT_THAT(text,
              HasSubstr("   0  host:1:ff     yes              1         2           4/9  no\n"));
  EXPECT_THAT(text,
              HasSubstr("   1  not attached  no               -         -           0/0  no\n"));
  EXPECT_THAT(text, HasSubstr("rank 0 is behind with: wte, h.0.b\n"));
  EXPECT_THAT(text, HasSubstr("  11  skipped    nan     0      -      0  65536      0     0  -"));
  EXPECT_THAT(text, HasSubstr("  12  applied      2   0.5   0.25      4      1     18     7  "
                              "0.001 to 0.002"));
  EXPECT_THAT(text, HasSubstr("step 11 was skipped: wte has a NaN\n"));
  EXPECT_THAT(text, HasSubstr("\nstep 12: the ranks voted a norm of 1\n"));
  EXPECT_THAT(text, HasSubstr("step 12 had no gradient for: head.b\n"));
}

TEST(JobText, ShowsMembersWithTheirRanks) {
  EXPECT_THAT(JobText(ExampleJob()), Not(HasSubstr("member")));
  v1::Job job = ExampleJob();
  v1::JobMember& away = *job.add_members();
  away.set_address("gpu1:7070");
  away.set_seconds_without_link(12.4);
  away.set_problem("nothing listens there");
  away.set_waited_for(true);
  v1::JobMember& here = *job.add_members();
  here.set_address("[fd00::1]:7070");
  here.set_linked(true);
  here.set_memory_bytes(int64_t{1} << 30);
  here.set_round_trip_seconds(0.00025);
  for (const int home : {1, 0, 1, 1, 1, 0}) job.add_homes(home);
  EXPECT_THAT(
      JobText(job),
      HasSubstr("\nmember          ranks   lead    memory  waited for  round trip  link\n"
                "gpu1:7070       1, 5                 -  yes                  -  none for 12 "
                "s: nothing listens there\n"
                "[fd00::1]:7070  0, 2-4  yes   1.00 GiB                 0.25 ms  yes\n\n"));
  // The lead has a link to it, and the tool gets no answer.
  away.set_linked(true);
  EXPECT_THAT(JobText(job), HasSubstr("-  yes; nothing listens there\n"));
  // A member that does not lead knows nothing of the others.
  away.set_linked(false);
  away.clear_problem();
  EXPECT_THAT(JobText(job), HasSubstr("yes                  -  -\n"));
  away.set_seconds_without_link(0);
  away.set_problem("nothing listens there");
  EXPECT_THAT(JobText(job), HasSubstr("-  -; nothing listens there\n"));
  job.clear_homes();
  for (int rank = 0; rank < 40; ++rank) job.add_homes(rank % 2);
  EXPECT_THAT(JobText(job), HasSubstr("gpu1:7070       0, 2, 4, 6, 8, 10, 12, 14, ...  yes"));
  job.set_phase(v1::CREATING);
  job.set_waits_for("member gpu1:7070 cannot be reached: nothing listens there");
  EXPECT_THAT(JobText(job), HasSubstr("creating; it waits: member gpu1:7070 cannot be reached: "));
  job.set_phase(v1::VOTING);
  job.set_waits_for("member gpu1:7070 has not reported the step");
  EXPECT_THAT(JobText(job),
              HasSubstr("voting; step 13 waits: member gpu1:7070 has not reported the step\n"));
}

TEST(JobText, SaysWhomTheStepWaitsFor) {
  v1::Job job = ExampleJob();
  EXPECT_THAT(JobText(job), HasSubstr("phase         open; step 13 waits for ranks 0, 1\n"));
  job.mutable_ranks(0)->set_sealed(true);
  EXPECT_THAT(JobText(job), HasSubstr("phase         open; step 13 waits for rank 1\n"));
  for (int rank = 2; rank < 12; ++rank) job.add_ranks()->set_rank(rank);
  EXPECT_THAT(JobText(job), HasSubstr("waits for ranks 1, 2, 3, 4, 5, 6, 7, 8 and 3 more\n"));
  job.set_phase(v1::SEALED);
  EXPECT_THAT(JobText(job), HasSubstr("sealed; step 13 is being decided\n"));
  job.set_phase(v1::VOTING);
  job.mutable_ranks(0)->set_voted(true);
  EXPECT_THAT(JobText(job), HasSubstr("voting; step 13 waits for the vote of ranks 1, 2, "));
  EXPECT_THAT(JobText(job), HasSubstr("  and voted\n"));
  job.set_phase(v1::UPDATING);
  EXPECT_THAT(JobText(job), HasSubstr("updating; chunks are moving to step 13\n"));
  job.set_phase(v1::BROKEN);
  job.set_problem("job gpt is broken: no memory; close it");
  EXPECT_THAT(JobText(job),
              HasSubstr("phase         broken; job gpt is broken: no memory; close it\n"
                        "saved         no checkpoint of this name"));
  job.mutable_found_checkpoint()->set_step(9);
  job.mutable_found_checkpoint()->set_directory("/saved/gpt/step-9.1");
  EXPECT_THAT(JobText(job), HasSubstr("saved         step 9 in /saved/gpt/step-9.1\n"));
  v1::ListJobsResponse list;
  *list.add_jobs() = job;
  EXPECT_THAT(JobsText(list), HasSubstr("\njob gpt is broken: no memory; close it\nmemory "));
  job.set_phase(v1::READY);
  EXPECT_THAT(JobText(job), HasSubstr("ready; between steps\n"));
}

TEST(JobText, StaysWithinAHundredColumns) {
  v1::Job job = ExampleJob();
  v1::RankProgress& rank = *job.mutable_ranks(0);
  rank.set_process_id("a-host-with-a-name:123456:0123456789abcdef");
  rank.clear_missing_parameters();
  for (int i = 0; i < 16; ++i)
    rank.add_missing_parameters(absl::StrCat("h.", i, ".mlp.c_fc.weight"));
  rank.set_chunks(12345);
  rank.set_chunks_complete(12344);
  for (int step = 13; step < 77; ++step) {
    v1::StepRecord& record = *job.add_recent_steps();
    record = job.recent_steps(1);
    record.set_step(1000000 + step);
    record.set_norm(1.2345678e-5);
    record.set_clip_coefficient(0.123456789);
    for (float& multiplier : *record.mutable_multipliers()) multiplier = 0.0123456789f;
    record.mutable_hyper_parameters(0)->set_lr(0.000123456789);
  }
  const std::string text = JobText(job);
  EXPECT_LE(WidestLine(text), 100u) << text;
  EXPECT_THAT(text, HasSubstr("h.15.mlp.c_fc.weight\n"));
  EXPECT_THAT(text, HasSubstr("the last 16 decisions; --json has more\n"));
  EXPECT_THAT(text, HasSubstr("\nsteps 1000061-1000076 had no gradient for: head.b\n"));
  EXPECT_THAT(text, HasSubstr("1000076  applied"));
  EXPECT_THAT(text, HasSubstr("1000061  applied"));
  EXPECT_THAT(text, Not(HasSubstr("1000060  applied")));
}

TEST(HistoryOf, TellsEveryHyperParameterApart) {
  const std::vector<std::function<void(v1::HyperParameters&)>> changes = {
      [](v1::HyperParameters& values) { values.set_lr(1); },
      [](v1::HyperParameters& values) { values.set_beta1(0.5); },
      [](v1::HyperParameters& values) { values.set_beta2(0.5); },
      [](v1::HyperParameters& values) { values.set_eps(1); },
      [](v1::HyperParameters& values) { values.set_weight_decay(1); },
      [](v1::HyperParameters& values) { values.set_decoupled_weight_decay(false); },
      [](v1::HyperParameters& values) { values.set_bias_correction(false); },
      [](v1::HyperParameters& values) { values.set_amsgrad(true); },
      [](v1::HyperParameters& values) { values.set_maximize(true); }};
  v1::Job job;
  job.add_groups();
  // The same values before and after each change.
  for (size_t i = 0; i <= 2 * changes.size(); ++i) {
    v1::StepRecord& record = *job.add_recent_steps();
    record.set_step(i + 1);
    *record.add_hyper_parameters() = Rates(0.1);
    if (i % 2 == 1) changes[i / 2](*record.mutable_hyper_parameters(0));
  }
  const auto history = HistoryOf(job);
  ASSERT_EQ(history.size(), 1u);
  EXPECT_EQ(history[0].size(), 2 * changes.size() + 1);
}

TEST(JobsText, SaysThatThereAreNone) {
  v1::ListJobsResponse response;
  response.set_memory_limit_bytes(int64_t{1} << 30);
  EXPECT_EQ(JobsText(response), "no jobs; memory 0 B of 1.00 GiB in use\n");
  *response.add_jobs() = ExampleJob();
  EXPECT_THAT(JobsText(response),
              HasSubstr("gpt  open     12       11        1         1.2      2"));
}

TEST(SummaryText, ShowsPlanesAndMagnitudes) {
  v1::StateSummary summary;
  summary.set_name("jobs/gpt/parameters/h.0/w");
  summary.set_group("jobs/gpt/groups/decay");
  summary.set_trainable(true);
  summary.add_shape(2);
  summary.add_shape(512);
  v1::PlaneSummary* plane = summary.add_planes();
  plane->set_plane(v1::EXP_AVG_SQ);
  plane->set_norm(1.5);
  plane->set_zeros(1024);
  for (int i = 0; i < 16; ++i) plane->add_magnitude_histogram(i == 8 ? 3 : 0);
  const std::string text = SummaryText(summary);
  EXPECT_THAT(text, HasSubstr("parameter     h.0/w\n"));
  EXPECT_THAT(text, HasSubstr("[2, 512] (1,024 elements)"));
  EXPECT_THAT(text, HasSubstr("exp_avg_sq: norm 1.5"));
  EXPECT_THAT(text, HasSubstr("1e-04 .. 1e-03"));
}

TEST(JobText, AJobThatIsBeingCreatedHasNothingButItsProgress) {
  v1::ListJobsResponse list;
  v1::Job& job = *list.add_jobs();
  job.set_name("jobs/gpt");
  job.set_phase(v1::CREATING);
  v1::Activity& activity = *job.add_activities();
  activity.set_kind(v1::MAKING_MEMORY);
  activity.set_job("jobs/gpt");
  activity.set_done_bytes(int64_t{2} << 30);
  activity.set_total_bytes(int64_t{6} << 30);
  EXPECT_THAT(JobText(job), testing::AllOf(HasSubstr("creating"), Not(HasSubstr("generation")),
                                           HasSubstr("making its memory: 2 of 6 GiB\n")));
  EXPECT_THAT(JobsText(list), testing::AllOf(HasSubstr("creating"),
                                             HasSubstr("gpt: making its memory: 2 of 6 GiB\n")));
  list.mutable_jobs(0)->set_waits_for("member b:7070 is making its memory");
  EXPECT_THAT(JobsText(list), HasSubstr(" waits: member b:7070 is making its memory\n"));
}

}  // namespace
}  // namespace ballast::client::cli
