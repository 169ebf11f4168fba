#include "client/cli_print.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <nlohmann/json.hpp>

#include "client/cli_json.h"

namespace ballast::client::cli {
namespace {

using testing::HasSubstr;

v1::Job ExampleJob() {
  v1::Job job;
  job.set_name("jobs/gpt");
  job.set_uid("u-1");
  job.set_phase(v1::OPEN);
  job.set_world_size(2);
  job.set_committed_step(12);
  job.set_applied_steps(11);
  job.set_skipped_steps(1);
  job.set_generation(2);
  job.mutable_memory()->set_total_bytes(3 << 20);
  job.mutable_memory()->set_state_bytes(1 << 20);
  job.mutable_memory()->set_accumulator_bytes(1 << 20);
  v1::RankProgress* rank = job.add_ranks();
  rank->set_attached(true);
  rank->set_process_id("host:1:ff");
  rank->set_begun(true);
  rank->set_micro_steps_ended(1);
  rank->set_chunks(9);
  rank->set_chunks_complete(4);
  job.add_ranks()->set_rank(1);
  v1::StepRecord* skipped = job.add_recent_steps();
  skipped->set_step(11);
  skipped->set_norm(std::numeric_limits<double>::quiet_NaN());
  skipped->set_skip_reason("wte has a NaN");
  v1::StepRecord* applied = job.add_recent_steps();
  applied->set_step(12);
  applied->set_applied(true);
  applied->set_norm(2);
  applied->set_clip_coefficient(0.5);
  applied->add_hyper_parameters()->set_lr(0.001);
  return job;
}

TEST(JobText, ShowsRanksAndDecisions) {
  const std::string text = JobText(ExampleJob());
  EXPECT_THAT(text, HasSubstr("job           gpt\n"));
  EXPECT_THAT(text, HasSubstr("12 committed (11 applied, 1 skipped)"));
  EXPECT_THAT(text, HasSubstr("memory        3.00 MiB (state 1.00 MiB, gradients 0 B, "
                              "accumulators 1.00 MiB, other 1.00 MiB)\n"));
  EXPECT_THAT(text, HasSubstr("   0  host:1:ff               1     4/9  no\n"));
  EXPECT_THAT(text, HasSubstr("   1  not attached            -     0/0  no\n"));
  EXPECT_THAT(text, HasSubstr("  11  skipped: wte has a NaN   nan"));
  EXPECT_THAT(text, HasSubstr("  12  applied                    2   0.5"));
}

TEST(JobJson, KeepsItsFieldsAndTurnsNaNIntoNull) {
  const nlohmann::json json = nlohmann::json::parse(Dump(ToJson(ExampleJob())));
  EXPECT_EQ(json["name"], "gpt");
  EXPECT_EQ(json["phase"], "open");
  EXPECT_EQ(json["committed_step"], 12);
  EXPECT_EQ(json["memory"]["total_bytes"], 3 << 20);
  EXPECT_EQ(json["ranks"][0]["chunks_complete"], 4);
  EXPECT_TRUE(json["recent_steps"][0]["norm"].is_null());
  EXPECT_EQ(json["recent_steps"][1]["hyper_parameters"][0]["lr"], 0.001);
}

TEST(JobsText, SaysThatThereAreNone) {
  v1::ListJobsResponse response;
  response.set_memory_limit_bytes(int64_t{1} << 30);
  EXPECT_EQ(JobsText(response), "no jobs; memory 0 B of 1.00 GiB in use\n");
  EXPECT_EQ(nlohmann::json::parse(Dump(ToJson(response)))["jobs"].size(), 0u);
  *response.add_jobs() = ExampleJob();
  EXPECT_THAT(JobsText(response), HasSubstr("gpt  open     12       11        1           2"));
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

}  // namespace
}  // namespace ballast::client::cli
