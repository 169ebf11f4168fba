#include "cpu_optimizer_service/job/kept/kept_job.h"

#include <gtest/gtest.h>

#include <string>

#include "cpu_optimizer_service/common/system/sha256.h"
#include "cpu_optimizer_service/host/kept_record.h"
#include "tests/cpu_optimizer_service/host/keeper_for_two.h"

namespace ballast {
namespace {

constexpr char kUid[] = "0123456789abcdef0123456789abcdef";

StepRecord SomeStep() {
  return {.outcome = {.step = 6,
                      .decision = {.apply = true,
                                   .norm = 3.5,
                                   .clip_coefficient = 0.25,
                                   .multipliers = {0.5f, 0.75f}},
                      .skip_reason = "none",
                      .skip_cause = SkipCause::kOther,
                      .unused_parameters = {"p3"}},
          .speculation = {.speculated = 5, .published = 3, .redone = 2},
          .micro_steps = 4,
          .loss_scale = 1024,
          .times = {.gathering = 1, .awaiting = 2, .deciding = 3, .updating = 4},
          .voted = {.max_norm = 1.5, .multipliers = {2, 3}},
          .abandoned = true,
          .hyper_parameters = {{.lr = 0.125}, {.beta1 = 0.5}}};
}

KeptDecision SomeDecision() {
  return {.outcome = SomeStep().outcome,
          .terms = {.step = 8,
                    .settings = {.scale = {.loss_scale = 2, .divisors = {4, 8}},
                                 .overrides = {{1, {.eps = 1e-6}}},
                                 .trainer_state = "begun",
                                 .expected_clipping = {.max_norm = 7}},
                    .hyper_parameters = {{.lr = 0.5}, {}}},
          .vote = {.apply = true,
                   .clipping = {.max_norm = 9},
                   .overrides = {{0, {.lr = 0.0625}}},
                   .trainer_state = "voted"},
          .attempt = 2,
          .micro_steps = 3,
          .coverage_complete = true,
          .hyper_parameters = {{}, {.weight_decay = 0}},
          .update_counts = {8, 0, 8},
          .values_after = {{.lr = 0.75}, {}},
          .speculation = {.speculated = 1, .published = 1}};
}

JobRecord SomeRecord() {
  JobRecord record = {.generation = {4, /*epoch=*/3},
                      .committed_step = 7,
                      .hyper_parameters = {{.lr = 0.25}, {.maximize = true}},
                      .update_counts = {7, 0, 6},
                      .trainer_state = "state",
                      .history = {},
                      .resumed_uid = "resumed",
                      .ancestors = {"parent", "grandparent"},
                      .previous = PreviousState{.committed_step = 6,
                                                .applied = true,
                                                .hyper_parameters = {{.lr = 1}, {}},
                                                .update_counts = {6, 0, 5},
                                                .trainer_state = "before"}};
  record.history.Add(SomeStep(), /*coverage_complete=*/true);
  record.epoch = 11;
  record.closed = true;
  record.closing = "because";
  record.loading = KeptLoad{.path = "/load", .weights_only = true};
  record.torn_by = "/torn";
  record.later_changes = {{.lr = 3}, {}};
  record.decision = SomeDecision();
  record.directions = {.record = SomeStep(),
                       .coverage_complete = true,
                       .update_counts = {7, 0, 6},
                       .second = SecondDecision{.left = {2}, .why = "because"}};
  record.undid_update = true;
  record.undone = {.step = 9, .generation = {2, /*epoch=*/3}};
  record.writing = KeptWrite{.write = {.step = 7,
                                       .number = 5,
                                       .planes = {Plane::kExpAvg},
                                       .parameters = {0, 2},
                                       .update_counts = {7, 6}},
                             .memory = "write 4"};
  record.state_writes = 5;
  record.last_vote = {.apply = false};
  return record;
}

// What was stored under the label, as a later process reads it.
std::string ReadStored(KeeperForTwo& keeper, const char* label) {
  NamedMemory memory(keeper);
  NamedArenas arenas(memory, kUid, "");
  return KeptRecord(arenas, label, /*capacity=*/1 << 16).TakeOver().value();
}

std::string HashOf(const std::string& bytes) {
  Sha256 sha256;
  sha256.Add(bytes);
  return sha256.Hex();
}

// Services of one format read each other's records: where the bytes are others, so is the format.
TEST(KeptJob, StoresARecordInTheBytesOfItsFormat) {
  KeeperForTwo keeper;
  NamedMemory memory(keeper);
  KeptJob kept(memory, {.uid = kUid, .spec = {}});
  ASSERT_TRUE(kept.Store(SomeRecord(), /*weights_complete=*/true,
                         {{"process0", "memory0"}, {"process1", ""}})
                  .ok());
  const std::string bytes = ReadStored(keeper, "record");
  EXPECT_EQ(bytes.size(), 3526u);
  EXPECT_EQ(HashOf(bytes), "06de6bbfc8bb45a562c31c64d11d9897a04f6828d59c6036d202efad27f96cb5");
}

}  // namespace
}  // namespace ballast
