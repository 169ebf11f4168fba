#include "cpu_optimizer_service/state/checkpoint.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "cpu_optimizer_service/common/buckets.h"
#include "tests/cpu_optimizer_service/job/outcome.h"
#include "tests/cpu_optimizer_service/state/checkpoint_for_tests.h"
#include "tests/support/messages.h"

namespace ballast {
namespace {

TEST_F(CheckpointTest, LoadedOntoAnyWorldSizeGoesOnWithTheSameBits) {
  Engine uninterrupted_engine({.memory_limit_bytes = int64_t{64} << 20, .threads = 2});
  JobDriver uninterrupted(uninterrupted_engine, Spec(2));
  JobDriver first(engine_, Spec(2));
  for (JobDriver* driver : {&uninterrupted, &first}) {
    driver->UploadWeights();
    driver->AttachAll();
    driver->Step(1, 2, {.overrides = {{0, {.lr = 0.05}}}});
    driver->Step(2);
  }
  ASSERT_TRUE(first.job().Save(Path("saved")).ok());
  uninterrupted.Step(3);
  uninterrupted.Step(4, 3);
  for (const int world_size : {1, 2, 3, 4}) {
    Engine engine({.memory_limit_bytes = int64_t{64} << 20, .threads = 2});
    JobDriver resumed(engine, Spec(world_size));
    ASSERT_TRUE(resumed.job().Load(Path("saved")).ok());
    EXPECT_EQ(resumed.job().Status().committed_step, 2u);
    EXPECT_EQ(resumed.job().Status().hyper_parameters[0].lr, 0.05);
    EXPECT_EQ(resumed.job().StateHash(), first.job().StateHash());
    resumed.AttachAll();
    resumed.Step(3);
    resumed.Step(4, 3);
    EXPECT_EQ(resumed.job().StateHash(), uninterrupted.job().StateHash()) << world_size << " ranks";
  }
}

TEST_F(CheckpointTest, ALoadBringsBackTheTrainersStateAndTheRecordOfTheLastStep) {
  const std::string any("\0\xff\"\n", 4);
  JobDriver first(engine_, Spec(2));
  first.UploadWeights();
  first.AttachAll();
  first.Step(1);
  // A skipped step: its norm is no number of JSON's. Then a change that it did not use.
  first.BeginAll({.scale = {.loss_scale = 8},
                  .overrides = {{0, {.lr = 0.05}}, {1, {.lr = 0.25}}},
                  .trainer_state = any});
  first.SendAllWith(NAN, 0, 7, 2, 0);
  first.EndMicroStepAll(0);
  first.SealAll(1);
  ASSERT_TRUE(first.job().UpdateGroup(0, {.lr = 0.5}).ok());
  ASSERT_TRUE(first.job().Save(Path("saved")).ok());
  const StepRecord saved = first.job().Status().recent_steps.back();
  first.Step(3);

  // The job itself, gone on meanwhile; and another, whose groups are in another order.
  JobDriver other(engine_, Turned());
  for (JobDriver* driver : {&first, &other}) {
    ASSERT_TRUE(driver->job().Load(Path("saved")).ok());
    const JobStatus status = driver->job().Status();
    EXPECT_EQ(status.trainer_state, any);
    ASSERT_EQ(status.recent_steps.size(), 1u);  // Not those of steps that are gone.
    const StepRecord& record = status.recent_steps[0];
    EXPECT_EQ(record.outcome.step, 2u);
    EXPECT_FALSE(record.outcome.decision.apply);
    EXPECT_TRUE(std::isnan(record.outcome.decision.norm));
    EXPECT_EQ(record.outcome.skip_reason, saved.outcome.skip_reason);
    EXPECT_EQ(record.micro_steps, 1u);
    EXPECT_EQ(record.loss_scale, 8);
    const int group0 = driver == &first ? 0 : 1;
    EXPECT_EQ(record.hyper_parameters[group0].lr, 0.05);
    EXPECT_EQ(record.hyper_parameters[1 - group0].lr, 0.25);
    EXPECT_EQ(status.hyper_parameters[group0].lr, 0.5);
    EXPECT_TRUE(record.hyper_parameters[1 - group0].amsgrad);
    // A checkpoint of what was loaded says the same.
    ASSERT_TRUE(driver->job().Save(Path("again")).ok());
    ASSERT_TRUE(driver->job().Load(Path("again")).ok());
    EXPECT_EQ(driver->job().Status().trainer_state, any);
    EXPECT_EQ(driver->job().Status().recent_steps[0].outcome.skip_reason,
              saved.outcome.skip_reason);
  }
}

TEST_F(CheckpointTest, ALoadBringsBackWhatWasVotedOfTheLastStep) {
  JobDriver first(engine_, Spec(1));
  first.UploadWeights();
  first.AttachAll();
  JobDriver other(engine_, Turned());
  const std::vector<StepVote> votes = {
      {.clipping = {.max_norm = 0.125}, .overrides = {{0, {.lr = 0.03}}}},
      {.clipping = {.multipliers = {0.5, 0.1}}},
      {.apply = false, .clipping = {.max_norm = 2}}};
  for (size_t i = 0; i < votes.size(); ++i) {
    first.BeginAll({.scale = {.loss_scale = 4}});
    first.SendAll(i, 0);
    first.EndMicroStepAll(0);
    first.SealToLook(1);
    first.VoteAll(votes[i]);
    const std::string path = Path(absl::StrCat("saved", i));
    SaveAt(first, absl::StrCat("saved", i));
    const StepRecord saved = first.job().Status().recent_steps.back();
    ASSERT_EQ(saved.voted, votes[i].clipping);
    for (JobDriver* driver : {&first, &other}) {
      ASSERT_TRUE(driver->job().Load(path).ok());
      const StepRecord record = driver->job().Status().recent_steps.back();
      const auto in_order = [&](auto values) {
        if (driver == &other) std::reverse(values.begin(), values.end());
        return values;
      };
      EXPECT_EQ(record.outcome.decision.apply, votes[i].apply);
      EXPECT_EQ(record.outcome.decision.norm, saved.outcome.decision.norm);
      EXPECT_EQ(record.outcome.decision.clip_coefficient, saved.outcome.decision.clip_coefficient);
      EXPECT_EQ(record.outcome.decision.multipliers, in_order(saved.outcome.decision.multipliers));
      EXPECT_EQ(record.outcome.decision.multipliers.empty(), !votes[i].apply);
      EXPECT_EQ(record.hyper_parameters, in_order(saved.hyper_parameters));
      EXPECT_EQ(record.voted.max_norm, votes[i].clipping.max_norm);
      EXPECT_EQ(record.voted.multipliers, in_order(votes[i].clipping.multipliers));
      EXPECT_EQ(record.abandoned, !votes[i].apply);
    }
    first.AttachAll();
  }
}

TEST_F(CheckpointTest, WhatTheIndexSaysOfTheLastStepIsChecked) {
  JobDriver driver(engine_, Spec(1));
  driver.UploadWeights();
  driver.AttachAll();
  driver.Step(1, 1, {.trainer_state = "state"});
  SaveAt(driver, "saved");
  const auto load_with = [&](const auto& change) {
    nlohmann::json index = ReadJson(Path("saved") + "/index.json");
    change(index);
    Sign(index);
    fs::remove_all(Path("changed"));
    fs::copy(Path("saved"), Path("changed"), fs::copy_options::recursive);
    std::ofstream(Path("changed") + "/index.json") << index;
    return driver.job().Load(Path("changed")).status();
  };
  using nlohmann::json;
  const std::vector<std::function<void(json&)>> kDamages = {
      [](json& index) { index["trainer_state"] = "abc"; },  // Half a byte,
      [](json& index) { index["trainer_state"] = "zz"; },   // no number,
      [](json& index) { index["trainer_state"] = 7; },      // no text,
      [](json& index) { index["trainer_state"] = std::string(2 * kMaxTrainerStateBytes + 2, 'a'); },
      [](json& index) { index["step"] = kMaxFirstStep + 1; },
      [](json& index) { index["last_step"]["norm"] = "many"; },
      [](json& index) { index["last_step"].erase("applied"); },
      [](json& index) { index["last_step"]["hyper_parameters"].erase(0); },
      [](json& index) {
        index["last_step"]["unused_parameters"] = std::vector<std::string>(kRecordedNames + 1);
      },
      [](json& index) {
        index["last_step"]["multipliers"] = {1, 2, 3};
      },
      [](json& index) { index["last_step"].erase("multipliers"); },
      [](json& index) { index["last_step"].erase("voted"); },
      [](json& index) { index.erase("last_step"); },
      [](json& index) { index.erase("trainer_state"); },
      [](json& index) { index.erase("epoch"); },
      [](json& index) { index.erase("generation"); },
      [](json& index) { index["last_step"]["hyper_parameters"][0]["rule"] = "soap"; },
      [](json& index) { index["groups"][0]["hyper_parameters"]["rule"] = 3; },
      [](json& index) { index["groups"][1]["name"] = index["groups"][0]["name"]; },
      [](json& index) { index["parameters"][0]["group"] = "nowhere"; },
      [](json& index) { index["last_step"]["voted"]["abandon"] = 1; },
      [](json& index) { index["last_step"]["voted"]["max_norm"] = -1; },
      [](json& index) {
        index["last_step"]["voted"]["multipliers"] = {1, 0};
      },
  };
  for (size_t i = 0; i < kDamages.size(); ++i) {
    EXPECT_EQ(load_with(kDamages[i]).code(), absl::StatusCode::kDataLoss) << i;
    EXPECT_EQ(driver.job().Status().trainer_state, "state") << i;
  }
  // A newer service's rule is no damage; and one that was the only one need not be there.
  EXPECT_TRUE(Refused(
      load_with([](json& index) { index["groups"][0]["hyper_parameters"]["rule"] = "soap"; }),
      absl::StatusCode::kFailedPrecondition));
  EXPECT_TRUE(
      load_with([](json& index) { index["groups"][0]["hyper_parameters"].erase("rule"); }).ok());
}

TEST_F(CheckpointTest, LoadRaisesTheGenerationAndDetaches) {
  JobDriver driver(engine_, Spec(1));
  driver.UploadWeights();
  driver.AttachAll();
  driver.Step(1);
  ASSERT_TRUE(driver.job().Save(Path("saved")).ok());
  const std::string saved = driver.job().StateHash();
  driver.Step(2);
  driver.BeginAll();
  driver.SendAll(3, 0);
  const Generation generation = driver.job().Status().generation;
  ASSERT_TRUE(driver.job().Load(Path("saved")).ok());
  EXPECT_EQ(driver.job().Status().generation, generation.Next());
  EXPECT_EQ(driver.listener(0).detached().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(driver.job().StateHash(), saved);
  EXPECT_EQ(driver.job().Status().phase, JobPhase::kReady);
}

TEST_F(CheckpointTest, WhatIsNoRegularFileIsRefusedAtOnce) {
  JobDriver driver(engine_, Spec(1));
  driver.UploadWeights();
  SaveAt(driver, "saved");
  for (const char* file : {"index.json", "exp_avg.safetensors"}) {
    fs::remove_all(Path("pipe"));
    fs::copy(Path("saved"), Path("pipe"), fs::copy_options::recursive);
    fs::remove(Path("pipe") + "/" + file);
    ASSERT_EQ(mkfifo((Path("pipe") + "/" + file).c_str(), 0600), 0);
    EXPECT_TRUE(Refused(driver.job().Load(Path("pipe")), absl::StatusCode::kInvalidArgument));
  }
}

TEST_F(CheckpointTest, AnIndexOfMoreThanTheJobCanHaveIsNotParsed) {
  JobDriver driver(engine_, Spec(1));
  driver.UploadWeights();
  SaveAt(driver, "saved");
  nlohmann::json index = ReadJson(Path("saved") + "/index.json");
  const nlohmann::json extra = index["parameters"][0];
  // Small enough: then the first of them is named.
  index["parameters"].push_back(extra);
  Sign(index);
  std::ofstream(Path("saved") + "/index.json") << index;
  EXPECT_TRUE(Refused(driver.job().Load(Path("saved")), absl::StatusCode::kDataLoss));
  for (int i = 0; i < 35'000; ++i) index["parameters"].push_back(extra);
  Sign(index);
  std::ofstream(Path("saved") + "/index.json") << index;
  EXPECT_TRUE(Refused(driver.job().Load(Path("saved")), absl::StatusCode::kFailedPrecondition));
}

TEST_F(CheckpointTest, ValuesThatNoUpdateLeavesAreRefusedByName) {
  JobDriver driver(engine_, Spec(1));
  driver.UploadWeights();
  driver.AttachAll();
  driver.Step(1);
  SaveAt(driver, "saved");
  const std::string hash = driver.job().StateHash();
  const auto load_with = [&](const std::string& plane, float value) {
    return LoadChanged(driver.job(), plane, "p2", 5, value);
  };
  for (const auto& [plane, value] : std::vector<std::pair<std::string, float>>{
           {"master", NAN},
           {"master", std::numeric_limits<float>::infinity()},
           {"master", -std::numeric_limits<float>::infinity()},
           {"exp_avg", NAN},
           {"exp_avg", std::numeric_limits<float>::infinity()},
           {"exp_avg_sq", NAN},
           {"exp_avg_sq", std::numeric_limits<float>::infinity()},
           {"exp_avg_sq", -1e-30f},
           {"exp_avg_sq", -std::numeric_limits<float>::infinity()}}) {
    EXPECT_TRUE(Refused(load_with(plane, value), absl::StatusCode::kDataLoss)) << plane;
    EXPECT_EQ(driver.job().StateHash(), hash);
  }
  EXPECT_TRUE(load_with("exp_avg", -1e-30f).ok());
  EXPECT_TRUE(load_with("exp_avg_sq", 0).ok());
  EXPECT_TRUE(load_with("master", std::numeric_limits<float>::lowest()).ok());
  EXPECT_TRUE(load_with("exp_avg_sq", std::numeric_limits<float>::max()).ok());
}

TEST_F(CheckpointTest, ValuesThatNoUpdateLeavesInPackedStateAreRefusedByName) {
  JobSpec spec = Spec(1);
  spec.layout.parameters.push_back({.name = "matrix", .shape = {64, 64}, .group = 0});
  spec.layout.states = {{.format = StateFormat::k8Bit}, {}};
  ASSERT_TRUE(CutInBuckets(1 << 20, spec.layout).ok());
  JobDriver driver(engine_, spec);
  driver.UploadWeights();
  driver.AttachAll();
  driver.Step(1);
  SaveAt(driver, "saved");
  const std::string hash = driver.job().StateHash();
  const auto load_with = [&](const std::string& plane, auto value) {
    return LoadChanged(driver.job(), plane, "matrix", 5, value);
  };
  constexpr uint16_t kInfinity = 0x7f80;
  EXPECT_TRUE(Refused(load_with("master", kInfinity), absl::StatusCode::kDataLoss));
  EXPECT_TRUE(Refused(load_with("exp_avg_scale", NAN), absl::StatusCode::kDataLoss));
  EXPECT_TRUE(Refused(load_with("exp_avg_scale", 1e38f), absl::StatusCode::kDataLoss));
  EXPECT_TRUE(Refused(load_with("exp_avg_sq_scale", -1.0f), absl::StatusCode::kDataLoss));
  EXPECT_EQ(driver.job().StateHash(), hash);
  EXPECT_TRUE(load_with("master_remainder", uint16_t{0x7fff}).ok());
  EXPECT_TRUE(load_with("exp_avg_scale", 8e37f).ok());

  // The largest weights have a bf16 half that is infinite. A moment may be too large to convert.
  JobDriver fp32(engine_, [&] {
    JobSpec wide = spec;
    wide.name = "wide";
    wide.layout.states = {};
    EXPECT_TRUE(CutInBuckets(1 << 20, wide.layout).ok());
    return wide;
  }());
  ASSERT_TRUE(driver.job().Save(Path("packed")).ok());
  const auto load = [](Job& job, const std::string& path) {
    Outcome<CheckpointInfo> loaded;
    (void)job.Load({.path = path, .convert_state = true}, loaded.done());
    return loaded.Get().status();
  };
  ASSERT_EQ(load(fp32.job(), Path("packed")), absl::OkStatus());
  SaveAt(fp32, "saved");
  constexpr float kLargest = std::numeric_limits<float>::max();
  ASSERT_TRUE(LoadChanged(fp32.job(), "master", "matrix", 5, kLargest).ok());
  ASSERT_EQ(load(driver.job(), Path("changed")), absl::OkStatus());
  ASSERT_TRUE(driver.job().Save(Path("largest")).ok());
  EXPECT_EQ(driver.job().Load(Path("largest")).status(), absl::OkStatus());
  const std::string with_largest = driver.job().StateHash();
  ASSERT_TRUE(LoadChanged(fp32.job(), "exp_avg", "matrix", 5, 1e38f).ok());
  EXPECT_TRUE(Refused(load(driver.job(), Path("changed")), absl::StatusCode::kFailedPrecondition));
  EXPECT_EQ(driver.job().StateHash(), with_largest);
}

TEST_F(CheckpointTest, DamageIsDataLossAndChangesNothing) {
  JobDriver driver(engine_, Spec(1));
  driver.UploadWeights();
  driver.AttachAll();
  driver.Step(1);
  SaveAt(driver, "saved");
  driver.Step(2);
  const std::string before = driver.job().StateHash();
  const auto load_damaged = [&](const std::string& file, const auto& damage) {
    fs::remove_all(Path("damaged"));
    fs::copy(Path("saved"), Path("damaged"), fs::copy_options::recursive);
    damage(Path("damaged") + "/" + file);
    const absl::Status status = driver.job().Load(Path("damaged")).status();
    EXPECT_EQ(driver.job().StateHash(), before);
    return status;
  };
  const auto flip = [](const std::string& path) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(-5, std::ios::end);
    file.put('\x7f');
  };
  const auto cut = [](const std::string& path) { fs::resize_file(path, fs::file_size(path) - 1); };
  const auto blow_up = [](const std::string& path) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.write("\xff\xff\xff\xff\xff\xff\xff\x7f", 8);
  };
  const auto truncate = [](const std::string& path) { fs::resize_file(path, 3); };
  for (const char* file :
       {"master.safetensors", "exp_avg.safetensors", "max_exp_avg_sq.safetensors"}) {
    EXPECT_EQ(load_damaged(file, flip).code(), absl::StatusCode::kDataLoss) << file;
    EXPECT_EQ(load_damaged(file, cut).code(), absl::StatusCode::kDataLoss) << file;
    EXPECT_EQ(load_damaged(file, blow_up).code(), absl::StatusCode::kDataLoss) << file;
    EXPECT_EQ(load_damaged(file, truncate).code(), absl::StatusCode::kDataLoss) << file;
  }
  EXPECT_EQ(load_damaged("index.json", truncate).code(), absl::StatusCode::kDataLoss);
  const auto rewrite = [](const std::string& path) {
    std::ofstream(path) << R"({"format": "ballast-checkpoint", "version": 1, "step": "three"})";
  };
  EXPECT_EQ(load_damaged("index.json", rewrite).code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(load_damaged(
                "", [&](const std::string& path) { fs::remove(path + "exp_avg_sq.safetensors"); })
                .code(),
            absl::StatusCode::kDataLoss);
  EXPECT_EQ(driver.job().Load(Path("nowhere")).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(CheckpointTest, AChangedIndexIsDataLoss) {
  JobDriver driver(engine_, Spec(1));
  driver.UploadWeights();
  SaveAt(driver, "saved");
  std::ifstream in(Path("saved") + "/index.json");
  const std::string text((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  for (const auto& [from, to] : std::vector<std::pair<std::string, std::string>>{
           {"\"lr\": 0.001", "\"lr\": 0.002"},
           {"\"step\": 0", "\"step\": -1"},
           {"\"update_count\": 0", "\"update_count\": 9223372036854775807"}}) {
    std::string changed = text;
    ASSERT_NE(changed.find(from), std::string::npos) << from;
    changed.replace(changed.find(from), from.size(), to);
    std::ofstream(Path("saved") + "/index.json") << changed;
    EXPECT_EQ(driver.job().Load(Path("saved")).status().code(), absl::StatusCode::kDataLoss) << to;
  }
  std::ofstream(Path("saved") + "/index.json") << text;
  EXPECT_TRUE(driver.job().Load(Path("saved")).ok());
}

TEST_F(CheckpointTest, AJobOfOtherParametersIsRefusedWithTheFirstDifference) {
  JobDriver driver(engine_, Spec(1));
  driver.UploadWeights();
  ASSERT_TRUE(driver.job().Save(Path("saved")).ok());
  JobSpec other = Spec(1);
  other.name = "other";
  other.layout.parameters[3].shape = {3, 1000};
  JobDriver different(engine_, other);
  EXPECT_TRUE(Refused(different.job().Load(Path("saved")), absl::StatusCode::kFailedPrecondition));
  EXPECT_EQ(different.job().Status().phase, JobPhase::kAwaitingWeights);
}

}  // namespace
}  // namespace ballast
