#include "proto/message_json.h"

#include <gmock/gmock.h>
#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>
#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "ballast/v1/diagnostics.pb.h"
#include "ballast/v1/jobs.pb.h"
#include "ballast/v1/state.pb.h"
#include "ballast/v1/train.pb.h"

namespace ballast::proto {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::util::MessageDifferencer;

constexpr char kText[] = "\"1\": \\ {\n\x1b[31m \u00e4";

void FillField(Message& message, const FieldDescriptor& field, int depth);

void Fill(Message& message, int depth) {
  for (int i = 0; i < message.GetDescriptor()->field_count(); ++i) {
    FillField(message, *message.GetDescriptor()->field(i), depth);
  }
}

void FillField(Message& message, const FieldDescriptor& field, int depth) {
  const google::protobuf::Reflection& reflection = *message.GetReflection();
  const bool repeated = field.is_repeated();
  switch (field.cpp_type()) {
#define BALLAST_SET(TYPE, Type, value)                              \
  case FieldDescriptor::CPPTYPE_##TYPE:                             \
    return repeated ? reflection.Add##Type(&message, &field, value) \
                    : reflection.Set##Type(&message, &field, value)
    BALLAST_SET(INT32, Int32, std::numeric_limits<int32_t>::min());
    BALLAST_SET(UINT32, UInt32, std::numeric_limits<uint32_t>::max());
    BALLAST_SET(INT64, Int64, std::numeric_limits<int64_t>::min());
    BALLAST_SET(UINT64, UInt64, std::numeric_limits<uint64_t>::max());
    BALLAST_SET(FLOAT, Float, 1.0f / 3);
    BALLAST_SET(DOUBLE, Double, 1.0 / 3);
    BALLAST_SET(BOOL, Bool, true);
    BALLAST_SET(ENUM, EnumValue, 1);
    BALLAST_SET(STRING, String, kText);
#undef BALLAST_SET
    case FieldDescriptor::CPPTYPE_MESSAGE:
      // Two, so that a field follows an object, too.
      for (int i = 0; i < (repeated && !field.is_map() ? 2 : 1) && depth < 6; ++i) {
        Fill(repeated ? *reflection.AddMessage(&message, &field)
                      : *reflection.MutableMessage(&message, &field),
             depth + 1);
      }
  }
}

std::unique_ptr<Message> New(const google::protobuf::Descriptor& type) {
  return std::unique_ptr<Message>(
      google::protobuf::MessageFactory::generated_factory()->GetPrototype(&type)->New());
}

void ExpectThatIntegersAreNumbers(const nlohmann::json& json) {
  if (json.is_string()) {
    EXPECT_NE(json, std::to_string(std::numeric_limits<int64_t>::min()));
    EXPECT_NE(json, std::to_string(std::numeric_limits<uint64_t>::max()));
  }
  if (json.is_structured()) {
    for (const nlohmann::json& value : json) ExpectThatIntegersAreNumbers(value);
  }
}

TEST(MessageJson, OfEveryPublicMessageIsReadBackAndHasNoNumberAsAString) {
  for (const auto* file :
       {v1::Job::descriptor()->file(), v1::TrainRequest::descriptor()->file(),
        v1::StateSummary::descriptor()->file(), v1::ServiceDescription::descriptor()->file()}) {
    for (int i = 0; i < file->message_type_count(); ++i) {
      SCOPED_TRACE(file->message_type(i)->full_name());
      const std::unique_ptr<Message> message = New(*file->message_type(i));
      Fill(*message, 0);
      const absl::StatusOr<std::string> json = ToJson(*message);
      ASSERT_TRUE(json.ok()) << json.status();
      ExpectThatIntegersAreNumbers(nlohmann::json::parse(*json));
      const std::unique_ptr<Message> read = New(*file->message_type(i));
      const absl::Status status = FromJson(*json, *read);
      ASSERT_TRUE(status.ok()) << status;
      EXPECT_TRUE(MessageDifferencer::Equals(*read, *message)) << *json;
    }
  }
}

TEST(MessageJson, HasFieldsThatAreZeroAndNamesOfTheProtocol) {
  v1::MemoryUse memory;
  memory.set_total_bytes(1'000'000'000'000);
  const nlohmann::json json = nlohmann::json::parse(*ToJson(memory));
  EXPECT_EQ(json["total_bytes"], 1'000'000'000'000);
  EXPECT_EQ(json["state_bytes"], 0);
  v1::StepRecord step;
  step.set_norm(std::numeric_limits<double>::quiet_NaN());
  step.set_clip_coefficient(-std::numeric_limits<double>::infinity());
  EXPECT_EQ(nlohmann::json::parse(*ToJson(step))["norm"], "NaN");
  EXPECT_EQ(nlohmann::json::parse(*ToJson(step))["clip_coefficient"], "-Infinity");
}

// It goes to terminals.
TEST(MessageJson, HasNoControlCharacters) {
  v1::Job job;
  job.set_name("\x1b[31m\x7f\u009b\r");
  EXPECT_THAT(*ToJson(job), testing::HasSubstr(R"("name": "\u001b[31m\u007f\u009b\r")"));
}

TEST(MessageJson, ThatIsNotOfTheMessageIsRefusedInOneLine) {
  for (const char* json :
       {"", "{", "[]", R"({"nmae": "jobs/a"})", R"({"rank": "x"})", "{\"name\":\n"}) {
    v1::AttachWorkerRequest request;
    const absl::Status status = FromJson(json, request);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << json;
    EXPECT_THAT(std::string(status.message()), testing::Not(testing::HasSubstr("\n")));
  }
}

}  // namespace
}  // namespace ballast::proto
