#include "cpu_optimizer_service/common/job_spec.h"

#include <gtest/gtest.h>

#include <limits>

#include "cpu_optimizer_service/common/rule.h"
#include "tests/support/messages.h"

namespace ballast::job_spec_test {
namespace {

JobSpec Spec() {
  JobSpec spec;
  spec.name = "gpt2-124M.run_1";
  spec.groups = {{.name = "decay"}, {.name = "no_decay"}};
  spec.layout.group_count = 2;
  spec.layout.parameters = {{.name = "w", .shape = {4, 4}, .group = 0}};
  spec.layout.partitions = {{.rank = 0, .group = 0, .begin = 0, .end = 256}};
  return spec;
}

TEST(JobSpec, NamesBecomeDirectoriesAndAreCheckedAsSuch) {
  EXPECT_TRUE(Validate(Spec()).ok());
  for (const char* name : {"", ".", "..", ".hidden", "a/b", "a b", "a\n", "\xc3\xa9"}) {
    JobSpec spec = Spec();
    spec.name = name;
    EXPECT_EQ(Validate(spec).code(), absl::StatusCode::kInvalidArgument) << name;
  }
  JobSpec spec = Spec();
  spec.name = std::string(129, 'x');
  EXPECT_FALSE(Validate(spec).ok());
}

TEST(JobSpec, GroupsAreCheckedByName) {
  JobSpec twice = Spec();
  twice.groups[1].name = "decay";
  EXPECT_TRUE(Refused(Validate(twice), absl::StatusCode::kInvalidArgument));
  JobSpec lr = Spec();
  lr.groups[1].hyper_parameters.lr = -1;
  EXPECT_TRUE(Refused(Validate(lr), absl::StatusCode::kInvalidArgument));
  JobSpec count = Spec();
  count.layout.group_count = 3;
  EXPECT_FALSE(Validate(count).ok());
}

TEST(JobSpec, FirstDifferenceLooksPastHyperParametersThatMayChange) {
  JobSpec other = Spec();
  other.groups[0].hyper_parameters.lr = 0.5;
  EXPECT_EQ(FirstDifference(Spec(), other), "");
  other.groups[0].hyper_parameters.amsgrad = true;
  EXPECT_TRUE(Says(FirstDifference(Spec(), other)));
  other = Spec();
  other.groups[1].wire_dtype = DType::kFloat32;
  EXPECT_TRUE(Says(FirstDifference(Spec(), other)));
  other = Spec();
  other.groups[1].hyper_parameters.decoupled_weight_decay = false;
  EXPECT_TRUE(Says(FirstDifference(Spec(), other)));
  other = Spec();
  other.unused_policy = UnusedPolicy::kSkip;
  EXPECT_TRUE(Says(FirstDifference(Spec(), other)));
  other = Spec();
  other.max_micro_steps = 1;
  EXPECT_TRUE(Says(FirstDifference(Spec(), other)));
  other = Spec();
  other.on_abort = OnAbort::kSkip;
  EXPECT_TRUE(Says(FirstDifference(Spec(), other)));
  other = Spec();
  other.keep_previous = true;
  EXPECT_TRUE(Says(FirstDifference(Spec(), other)));
}

TEST(JobSpec, FirstDifferenceComparesMeshes) {
  JobSpec spec = Spec();
  spec.layout.partitions.clear();
  spec.layout.world_size = 4;
  spec.layout.mesh = {{"dp", 4}};
  spec.layout.parameters[0].placements = {{.shard_dim = 0}};
  EXPECT_EQ(FirstDifference(spec, spec), "");
  EXPECT_TRUE(Says(FirstDifference(Spec(), spec)));
  JobSpec other = spec;
  other.layout.parameters[0].placements = {{.shard_dim = 1}};
  EXPECT_TRUE(Says(FirstDifference(spec, other)));
}

// Four ranks, two with each member.
JobSpec OverMembers() {
  JobSpec spec = Spec();
  spec.layout.world_size = 4;
  spec.members = {{.address = "a:7070"}, {.address = "b:7070"}};
  spec.homes = {0, 1, 1, 0};
  return spec;
}

TEST(JobSpec, EachRankHasAHomeAndEachMemberARank) {
  EXPECT_TRUE(Validate(OverMembers()).ok());
  const auto expect_refused = [](void (*spoil)(JobSpec&)) {
    JobSpec spec = OverMembers();
    spoil(spec);
    EXPECT_TRUE(Refused(Validate(spec), absl::StatusCode::kInvalidArgument));
  };
  expect_refused([](JobSpec& spec) { spec.members[1] = spec.members[0]; });
  expect_refused([](JobSpec& spec) { spec.homes.pop_back(); });
  expect_refused([](JobSpec& spec) { spec.homes[2] = 2; });
  expect_refused([](JobSpec& spec) { spec.homes[2] = -1; });
  expect_refused([](JobSpec& spec) { spec.homes = {0, 0, 0, 0}; });
  expect_refused([](JobSpec& spec) { spec.members.clear(); });
  expect_refused([](JobSpec& spec) { spec.members[1].address.clear(); });
  expect_refused([](JobSpec& spec) { spec.members[1].address.assign(301, 'x'); });
  expect_refused([](JobSpec& spec) { spec.members.resize(1025); });
  expect_refused([](JobSpec& spec) { spec.layout.world_size = -1; });
}

TEST(JobSpec, ARuleOfTwoRoundsTakesWholeMatricesOfOneService) {
  const auto with_muon = [](JobSpec spec) {
    for (GroupSpec& group : spec.groups) group.hyper_parameters = DefaultsOf(Rule::kMuon);
    for (ParameterSpec& parameter : spec.layout.parameters) parameter.shape = {2, 128};
    return spec;
  };
  JobSpec spec = with_muon(Spec());
  EXPECT_TRUE(Validate(spec).ok());
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{7}, {}, {2, 3, 4}}) {
    spec.layout.parameters[0].shape = shape;
    spec.layout.parameters[0].trainable = true;
    EXPECT_TRUE(Refused(Validate(spec), absl::StatusCode::kInvalidArgument));
    spec.layout.parameters[0].trainable = false;
    EXPECT_TRUE(Validate(spec).ok());
  }
  EXPECT_TRUE(Refused(Validate(with_muon(OverMembers())), absl::StatusCode::kInvalidArgument));
}

TEST(JobSpec, FirstDifferenceComparesMembers) {
  EXPECT_EQ(FirstDifference(OverMembers(), OverMembers()), "");
  JobSpec other = OverMembers();
  other.members.clear();
  other.homes.clear();
  EXPECT_TRUE(Says(FirstDifference(OverMembers(), other)));
  other = OverMembers();
  other.members[1].address = "c:7070";
  EXPECT_TRUE(Says(FirstDifference(OverMembers(), other)));
  other = OverMembers();
  other.homes = {0, 1, 0, 1};
  EXPECT_TRUE(Says(FirstDifference(OverMembers(), other)));
  other = OverMembers();
  other.homes.pop_back();
  EXPECT_TRUE(Says(FirstDifference(OverMembers(), other)));
  // The number of ranks says more than that of homes.
  other.layout.world_size = 3;
  EXPECT_TRUE(Says(FirstDifference(OverMembers(), other)));
}

}  // namespace
}  // namespace ballast::job_spec_test
