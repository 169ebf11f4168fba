#include "client/cli/cli_print.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/cli/cli_history.h"
#include "client/cli/cli_json.h"
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

TEST(JobText, SaysWhatWasVoted) {
  v1::Job job = ExampleJob();
  v1::StepRecord step = job.recent_steps(1);
  job.clear_recent_steps();
  const auto add = [&](uint64_t number) -> v1::StepRecord& {
    v1::StepRecord& added = *job.add_recent_steps();
    added = step;
    added.set_step(number);
    return added;
  };
  add(12), add(13);
  add(14).clear_voted();  // Nothing but to apply it.
  add(15).set_abandoned(true);
  v1::Clipping& times = *add(16).mutable_voted();
  times.clear_max_norm();
  times.add_multipliers(0.5), times.add_multipliers(0.25);
  EXPECT_THAT(JobText(job), HasSubstr("\nsteps 12-13: the ranks voted a norm of 1\n"
                                      "step 15: the ranks voted to abandon it\n"
                                      "step 16: the ranks voted multipliers of 0.25 to 0.5\n"));
  job.set_on_abort(v1::SKIP_STEP);
  EXPECT_THAT(JobText(job), HasSubstr("on abort      skip\n"));
}

TEST(JobText, SaysHowChunksAreUpdated) {
  v1::Job job = ExampleJob();
  EXPECT_THAT(JobText(job), HasSubstr("update        speculate; speculated chunks: 1,200 (1,100 "
                                      "published, 90 redone), paused now: 3\n"));
  job.mutable_speculation()->set_unavailable("needs 3 GiB more");
  EXPECT_THAT(JobText(job), HasSubstr("wait, though asked to speculate: needs 3 GiB more\n"));
  job.clear_speculation();
  job.set_update_mode(v1::WAIT);
  job.mutable_memory()->set_speculation_bytes(0);
  EXPECT_THAT(JobText(job), HasSubstr("update        wait\n"));
  EXPECT_THAT(JobText(job), Not(HasSubstr("second versions")));
  job.mutable_ranks(0)->set_shared_memory(false);
  EXPECT_THAT(JobText(job), Not(HasSubstr("shared  ")));
}

TEST(JobText, SaysWhichStepCanBeUndone) {
  v1::Job job = ExampleJob();
  EXPECT_THAT(JobText(job), Not(HasSubstr("undo")));
  job.set_keep_previous(true);
  job.mutable_memory()->set_total_bytes(6 << 20);
  job.mutable_memory()->set_previous_bytes(1 << 20);
  EXPECT_THAT(JobText(job), HasSubstr("undo          nothing to undo\n"));
  EXPECT_THAT(JobText(job), HasSubstr("previous versions 1.00 MiB, other 1.00 MiB\n"));
  job.set_undoable_step(12);
  EXPECT_THAT(JobText(job), HasSubstr("undo          step 12 can be undone\n"));
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

// Steps 5 to 8 with lr 0.1, but 0.3 in step 7, and then a load that went back to step 8.
v1::Job JobWithHistory() {
  v1::Job job;
  job.set_name("jobs/gpt");
  job.add_groups()->set_name("jobs/gpt/groups/decay");
  job.add_groups()->set_name("jobs/gpt/groups/frozen");
  for (const auto& [step, lr] : std::vector<std::pair<uint64_t, double>>{
           {5, 0.1}, {6, 0.1}, {7, 0.1 + 0.2}, {8, 0.1}, {8, 0.1}, {9, 0.1}}) {
    v1::StepRecord& record = *job.add_recent_steps();
    record.set_step(step);
    *record.add_hyper_parameters() = Rates(lr);
    *record.add_hyper_parameters() = Rates(0);
    if (step == 6) record.mutable_hyper_parameters(1)->set_maximize(true);
  }
  return job;
}

TEST(HistoryText, HasOneRowForEachRunOfStepsWithEqualValues) {
  EXPECT_EQ(HistoryText(JobWithHistory()),
            "group decay\n"
            "used in                     lr  betas         eps  weight decay   options\n"
            "steps 5-6                  0.1  0.9, 0.999  1e-08  0.1 decoupled  -\n"
            "step 7     0.30000000000000004  0.9, 0.999  1e-08  0.1 decoupled  -\n"
            "step 8                     0.1  0.9, 0.999  1e-08  0.1 decoupled  -\n"
            "steps 8-9                  0.1  0.9, 0.999  1e-08  0.1 decoupled  -\n"
            "\n"
            "group frozen\n"
            "used in    lr  betas         eps  weight decay   options\n"
            "step 5      0  0.9, 0.999  1e-08  0.1 decoupled  -\n"
            "step 6      0  0.9, 0.999  1e-08  0.1 decoupled  maximize\n"
            "steps 7-8   0  0.9, 0.999  1e-08  0.1 decoupled  -\n"
            "steps 8-9   0  0.9, 0.999  1e-08  0.1 decoupled  -\n");
  EXPECT_EQ(HistoryText(v1::Job()), "no step has been decided yet\n");
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

TEST(HistoryJson, KeepsItsFields) {
  const nlohmann::json json = nlohmann::json::parse(Dump(HistoryToJson(JobWithHistory())));
  EXPECT_EQ(json["job"], "gpt");
  EXPECT_EQ(json["groups"][1]["name"], "frozen");
  const nlohmann::json& run = json["groups"][0]["history"][0];
  EXPECT_EQ(run["first_step"], 5);
  EXPECT_EQ(run["last_step"], 6);
  EXPECT_EQ(run["hyper_parameters"]["beta2"], 0.999);
}

TEST(JobJson, KeepsItsFieldsAndTurnsNaNIntoNull) {
  const nlohmann::json json = nlohmann::json::parse(Dump(ToJson(ExampleJob())));
  EXPECT_EQ(json["name"], "gpt");
  EXPECT_EQ(json["phase"], "open");
  EXPECT_EQ(json["committed_step"], 12);
  EXPECT_EQ(json["memory"]["total_bytes"], 5 << 20);
  EXPECT_EQ(json["memory"]["speculation_bytes"], 2 << 20);
  EXPECT_EQ(json["memory"]["other_bytes"], 1 << 20);
  EXPECT_EQ(json["memory"]["shared_bytes"], 3 << 20);
  EXPECT_EQ(json["update_mode"], "speculate");
  EXPECT_EQ(json["speculation"]["redone_chunks"], 90);
  EXPECT_EQ(json["coverage_complete_steps"], 12);
  EXPECT_EQ(json["not_kept_steps"], 0);
  EXPECT_EQ(json["ranks"][0]["chunks_complete"], 4);
  EXPECT_EQ(json["ranks"][0]["furthest_micro_step"], 2);
  EXPECT_EQ(json["ranks"][0]["missing_parameters"], nlohmann::json({"wte", "h.0.b"}));
  EXPECT_EQ(json["ranks"][0]["shared_memory"], true);
  EXPECT_EQ(json["ranks"][1]["shared_memory"], false);
  EXPECT_TRUE(json["recent_steps"][0]["norm"].is_null());
  EXPECT_EQ(json["recent_steps"][1]["hyper_parameters"][0]["lr"], 0.001);
  EXPECT_EQ(json["recent_steps"][1]["unused_parameters"], nlohmann::json({"head.b"}));
  EXPECT_EQ(json["recent_steps"][1]["speculated_chunks"], 18);
  EXPECT_EQ(json["recent_steps"][1]["published_chunks"], 11);
  EXPECT_EQ(json["recent_steps"][1]["redone_chunks"], 7);
}

TEST(JobsText, SaysThatThereAreNone) {
  v1::ListJobsResponse response;
  response.set_memory_limit_bytes(int64_t{1} << 30);
  EXPECT_EQ(JobsText(response), "no jobs; memory 0 B of 1.00 GiB in use\n");
  EXPECT_EQ(nlohmann::json::parse(Dump(ToJson(response)))["jobs"].size(), 0u);
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
  const nlohmann::json json = nlohmann::json::parse(Dump(ToJson(summary)));
  EXPECT_EQ(json["shape"], nlohmann::json({2, 512}));
  EXPECT_EQ(json["planes"][0]["magnitude_histogram"][8],
            nlohmann::json({{"exponent", -4}, {"count", 3}}));
}

TEST(Dump, SurvivesBytesThatAreNotText) {
  v1::Job job;
  job.set_uid("\xff\xfe");
  EXPECT_TRUE(nlohmann::json::accept(Dump(ToJson(job))));
}

TEST(JobText, SaysWhatASaveDoesAndNoCauseThatIsNotKnown) {
  v1::Job job = ExampleJob();
  job.set_phase(v1::SEALED);
  EXPECT_THAT(JobText(job), HasSubstr("sealed; step 13 is being decided"));
  v1::SaveProgress& save = *job.add_saves();
  save.set_directory("/saved/gpt");
  save.set_step(12);
  save.set_seconds(83.4);
  save.set_seconds_since_progress(2);
  save.set_written_bytes(1 << 30);
  save.set_size_bytes(int64_t{3} << 30);
  EXPECT_THAT(JobText(job),
              testing::AllOf(HasSubstr("step 12 to /saved/gpt for 83 s, 1.00 GiB of 3.00 GiB\n"),
                             HasSubstr("sealed; step 13 is being decided")));
  save.set_seconds_since_progress(61);
  save.set_holds_back_decisions(true);
  EXPECT_THAT(
      JobText(job),
      testing::AllOf(HasSubstr("nothing was written for 61 s; steps wait for it, because there is "
                               "no memory for second versions\n"),
                     HasSubstr("sealed; step 13 waits for the save to /saved/gpt"),
                     Not(HasSubstr("being decided"))));
  EXPECT_EQ(ToJson(job)["saves"][0]["seconds_since_progress"], 61);
  save.set_makes_memory(true);
  v1::Activity& activity = *job.add_activities();
  activity.set_kind(v1::MAKING_SECOND_VERSIONS);
  activity.set_done_bytes(int64_t{2} << 30);
  activity.set_total_bytes(int64_t{3} << 30);
  EXPECT_THAT(JobText(job),
              testing::AllOf(HasSubstr("no memory was made for 61 s; steps wait until there is "
                                       "memory for second versions\n"),
                             HasSubstr("making memory for second versions: 2 of 3 GiB\n"),
                             Not(HasSubstr("there is no memory"))));
  EXPECT_EQ(ToJson(job)["activities"][0]["kind"], "making_second_versions");
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
  EXPECT_THAT(
      JobsText(list),
      testing::AllOf(HasSubstr("creating"), HasSubstr("gpt: making its memory: 2 of 6 GiB\n")));
}

}  // namespace
}  // namespace ballast::client::cli
