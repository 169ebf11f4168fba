#include "proto/convert.h"

#include <gtest/gtest.h>

#include <string>
#include <type_traits>

#include "cpu_optimizer_service/common/rule.h"
#include "tests/support/messages.h"

namespace ballast::proto {
namespace {

JobSpec SomeJob() {
  JobSpec spec;
  spec.name = "gpt2";
  spec.groups = {
      {.name = "decay", .hyper_parameters = {.lr = 0.5, .beta1 = 0.1, .weight_decay = 0.25}},
      {.name = "no_decay",
       .hyper_parameters = {.lr = 3,
                            .beta1 = 0.2,
                            .beta2 = 0.3,
                            .eps = 1e-15,
                            .weight_decay = 0,
                            .decoupled_weight_decay = false,
                            .bias_correction = false,
                            .amsgrad = true,
                            .maximize = true},
       .wire_dtype = DType::kFloat32,
       .return_dtype = DType::kFloat16}};
  spec.layout.world_size = 2;
  spec.layout.group_count = 2;
  spec.layout.parameters = {{.name = "h.0/w", .shape = {3, 4}, .group = 0},
                            {.name = "scale", .shape = {}, .group = 1},
                            {.name = "frozen", .shape = {0, 7}, .group = 1, .trainable = false}};
  spec.layout.partitions = {{.rank = 0, .group = 0, .begin = 0, .end = 256},
                            {.rank = 1, .group = 1, .begin = 0, .end = 256}};
  spec.layout.chunk_elements = 512;
  spec.on_abort = OnAbort::kSkip;
  spec.keep_previous = true;
  spec.unused_policy = UnusedPolicy::kZero;
  spec.max_micro_steps = 4;
  return spec;
}

TEST(JobSpec, SurvivesTheWireInEveryField) {
  const absl::StatusOr<JobSpec> read = FromProto(ToProto(SomeJob()));
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(*read, SomeJob());
}

TEST(JobSpec, AMeshAndPlacementsSurviveTheWire) {
  JobSpec spec = SomeJob();
  spec.layout.partitions.clear();
  spec.layout.mesh = {{"dp", 1}, {"tp", 2}};
  spec.layout.parameters[0].placements = {{.shard_dim = 0}, {.shard_dim = 1}};
  spec.layout.parameters[1].placements = {{}, {}};
  const absl::StatusOr<JobSpec> read = FromProto(ToProto(spec));
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(*read, spec);
  EXPECT_EQ(ToProto(spec).parameters(1).placements(0), -1) << "Replicate, as the protocol has it";
}

TEST(JobSpec, MembersAndHomesSurviveTheWire) {
  JobSpec spec = SomeJob();
  spec.members = {{.address = "a:7070"}, {.address = "[fd00::1]:7070"}};
  spec.homes = {1, 0};
  const absl::StatusOr<JobSpec> read = FromProto(ToProto(spec));
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(*read, spec);
  EXPECT_EQ(ToProto(spec, /*with_parameters=*/false).homes(0), 1) << "Whoever lists jobs sees them";
}

TEST(JobSpec, UnderstandsBareNamesAndResourceNames) {
  v1::Job job = ToProto(SomeJob());
  EXPECT_EQ(job.name(), "jobs/gpt2");
  EXPECT_EQ(job.groups(0).name(), "jobs/gpt2/groups/decay");
  EXPECT_EQ(job.parameters(0).name(), "jobs/gpt2/parameters/h.0/w");
  job.set_name("gpt2");
  job.mutable_groups(0)->set_name("decay");
  job.mutable_parameters(0)->set_name("h.0/w");
  const absl::StatusOr<JobSpec> read = FromProto(job);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(*read, SomeJob());
}

TEST(JobSpec, DefaultsAreThoseOfTheProtocol) {
  v1::Job job = ToProto(SomeJob());
  job.set_chunk_elements(0);
  job.set_unused_policy(v1::UNUSED_POLICY_UNSPECIFIED);
  job.mutable_groups(1)->set_wire_dtype(v1::DTYPE_UNSPECIFIED);
  job.mutable_groups(1)->set_return_dtype(v1::DTYPE_UNSPECIFIED);
  const absl::StatusOr<JobSpec> read = FromProto(job);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->layout.chunk_elements, kMaxChunkElements);
  EXPECT_EQ(read->unused_policy, UnusedPolicy::kError);
  EXPECT_EQ(read->groups[1].wire_dtype, DType::kBFloat16);
  EXPECT_EQ(read->groups[1].return_dtype, DType::kBFloat16);
}

TEST(JobSpec, UnknownEnumValuesAreInvalid) {
  v1::Job job = ToProto(SomeJob());
  job.mutable_groups(1)->set_wire_dtype(static_cast<v1::DType>(77));
  EXPECT_TRUE(Refused(FromProto(job), absl::StatusCode::kInvalidArgument));

  job = ToProto(SomeJob());
  job.set_unused_policy(static_cast<v1::UnusedPolicy>(-1));
  EXPECT_EQ(FromProto(job).status().code(), absl::StatusCode::kInvalidArgument);
}

// With other values than the defaults.
HyperParameters SomeValues(Rule rule) {
  HyperParameters values = DefaultsOf(rule);
  double number = 0.1;
  ForEachOf(
      rule,
      [&]<typename T>(const char*, T& value) {
        if constexpr (std::is_same_v<T, bool>) {
          value = !value;
        } else if constexpr (std::is_same_v<T, int32_t>) {
          value += 3;
        } else {
          value = number += 0.01;
        }
      },
      values);
  return values;
}

TEST(HyperParameters, OfEveryRuleCrossTheWireWithTheirFieldsAlone) {
  const google::protobuf::Descriptor& fields = *v1::HyperParameters::descriptor();
  for (const RuleRow& row : Rules()) {
    const HyperParameters values = SomeValues(row.defaults.rule);
    const v1::HyperParameters message = ToProto(values);
    EXPECT_EQ(FullFromProto(message).value(), values) << row.name;
    for (int i = 0; i < fields.field_count(); ++i) {
      const bool is_set = message.GetReflection()->HasField(message, fields.field(i));
      const std::string name(fields.field(i)->name());
      EXPECT_EQ(is_set, name == "rule" || row.has(name)) << row.name << " " << name;
    }
  }
}

TEST(HyperParameters, EveryAbsentFieldIsNamedAndEveryOneOfAnotherRule) {
  HyperParameters every;
  ForEachHyperParameter(
      [](const char* name, auto&) {
        for (const Rule rule : {Rule::kAdam, Rule::kSgd, Rule::kAdagrad, Rule::kMuon}) {
          v1::HyperParameters values = ToProto(DefaultsOf(rule));
          const auto* const field = v1::HyperParameters::descriptor()->FindFieldByName(name);
          if (RowOf(rule).has(name)) {
            values.GetReflection()->ClearField(&values, field);
          } else if (field->type() == google::protobuf::FieldDescriptor::TYPE_BOOL) {
            values.GetReflection()->SetBool(&values, field, false);
          } else if (field->type() == google::protobuf::FieldDescriptor::TYPE_INT32) {
            values.GetReflection()->SetInt32(&values, field, 0);
          } else {
            values.GetReflection()->SetDouble(&values, field, 0);
          }
          EXPECT_TRUE(Refused(FullFromProto(values), absl::StatusCode::kInvalidArgument));
        }
      },
      every);
}

TEST(HyperParameters, WithoutARuleAreAdamsAndOfAnUnknownOneAreRefused) {
  v1::HyperParameters values = ToProto(HyperParameters());
  values.clear_rule();
  EXPECT_EQ(FullFromProto(values).value(), HyperParameters());
  values.set_rule(static_cast<v1::Rule>(77));
  EXPECT_TRUE(Refused(FullFromProto(values), absl::StatusCode::kInvalidArgument));
}

TEST(HyperParameterOverrides, SurviveTheWirePresentOrAbsent) {
  HyperParameterOverrides all = {.lr = 1,
                                 .beta1 = 0.2,
                                 .beta2 = 0.3,
                                 .eps = 4,
                                 .weight_decay = 5,
                                 .decoupled_weight_decay = false,
                                 .bias_correction = true,
                                 .momentum = 0.5,
                                 .dampening = 0.25,
                                 .nesterov = true,
                                 .lr_decay = 0.125,
                                 .ns_steps = 3,
                                 .ns_a = 2.5,
                                 .ns_b = -1.5,
                                 .ns_c = 0.5,
                                 .match_rms_adamw = true,
                                 .maximize = false};
  EXPECT_EQ(OverridesFromProto(ToProto(all)).value(), all);
  const HyperParameterOverrides none;
  EXPECT_EQ(OverridesFromProto(ToProto(none)).value(), none);
}

TEST(HyperParameterOverrides, CannotChangeWhatIsFixed) {
  v1::HyperParameters amsgrad;
  amsgrad.set_amsgrad(false);
  v1::HyperParameters rule;
  rule.set_rule(v1::ADAM);
  v1::HyperParameters initial;
  initial.set_initial_accumulator_value(0);
  for (const v1::HyperParameters& changes : {amsgrad, rule, initial}) {
    EXPECT_TRUE(Refused(OverridesFromProto(changes), absl::StatusCode::kInvalidArgument));
  }
}

TEST(ResourceName, IsTakenApart) {
  EXPECT_EQ(ParseJobName("jobs/a")->job, "a");
  const ResourceName group = ParseGroupName("jobs/a/groups/g").value();
  EXPECT_EQ(group.job, "a");
  EXPECT_EQ(group.child, "g");
  const ResourceName parameter = ParseParameterName("jobs/a/parameters/x/parameters/y").value();
  EXPECT_EQ(parameter.job, "a");
  EXPECT_EQ(parameter.child, "x/parameters/y");
}

TEST(ResourceName, OfAnotherFormIsInvalid) {
  for (const char* name : {"", "a", "jobs", "jobs/", "jobs/a/b", "job/a"}) {
    EXPECT_EQ(ParseJobName(name).status().code(), absl::StatusCode::kInvalidArgument) << name;
  }
  for (const char* name :
       {"", "jobs/a", "jobs/a/groups", "jobs/a/groups/", "jobs//groups/g", "jobs/a/parameters/p"}) {
    EXPECT_EQ(ParseGroupName(name).status().code(), absl::StatusCode::kInvalidArgument) << name;
  }
  EXPECT_EQ(ParseParameterName("jobs/a/groups/g").status().code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace ballast::proto
