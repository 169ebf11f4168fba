#include "proto/field_count.h"

#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <gtest/gtest.h>

#include <string>

#include "ballast/v1/jobs.pb.h"
#include "ballast/v1/train.pb.h"

namespace ballast::proto::field_count_test {
namespace {

template <typename Message = v1::CreateJobRequest>
int64_t Count(const std::string& bytes, int64_t most = 1000) {
  google::protobuf::io::ArrayInputStream stream(bytes.data(), static_cast<int>(bytes.size()));
  return CountFields(*Message::descriptor(), stream, most);
}

std::string Times(int count, const std::string& bytes) {
  std::string all;
  for (int i = 0; i < count; ++i) all += bytes;
  return all;
}

// A field of fewer than 128 bytes.
std::string Field(int number, const std::string& content) {
  return std::string(1, static_cast<char>(number << 3 | 2)) +
         std::string(1, static_cast<char>(content.size())) + content;
}

TEST(FieldCount, IsOfMessagesWithinAndNotOfNumbersAndNames) {
  v1::CreateJobRequest request;
  v1::Job& job = *request.mutable_job();
  job.set_name("jobs/a");
  job.set_world_size(2);
  for (int i = 0; i < 3; ++i) {
    v1::Parameter& parameter = *job.add_parameters();
    parameter.set_name("w");
    for (int k = 0; k < 50; ++k) parameter.add_shape(k);
  }
  job.add_groups()->mutable_hyper_parameters()->set_lr(1);
  EXPECT_EQ(Count(request.SerializeAsString()), 1 + 3 + 2);
}

TEST(FieldCount, IsOfAllThatAMessageDoesNotHaveWhereverItIs) {
  const std::string unknown = Field(15, "");
  EXPECT_EQ(Count(Times(7, unknown)), 7);
  EXPECT_EQ(Count(Field(1, Times(7, unknown))), 1 + 7);
  EXPECT_EQ(Count(Field(1, Field(4, Times(7, unknown)))), 2 + 7);
  // A number in the place of a name, and the other way round.
  EXPECT_EQ(Count<v1::GetJobRequest>(Times(3, "\x08\x01")), 3);
  EXPECT_EQ(Count<v1::GetJobRequest>(Times(3, Field(2, ""))), 3);
  EXPECT_EQ(Count<v1::GetJobRequest>(Times(3, Field(1, "jobs/a"))), 0);
}

TEST(FieldCount, IsOfGroupsAndOfWhatIsInThem) {
  const std::string group = std::string("\x7b") + Times(3, "\x08\x01") + "\x7c";
  EXPECT_EQ(Count(group), 4);
  EXPECT_EQ(Count("\x7b" + Times(2, group) + "\x7c"), 9);
}

TEST(FieldCount, IsOfStringsThatRepeatAndNotOfNumbersThatDo) {
  v1::StepDecision decision;
  for (int i = 0; i < 5; ++i) decision.add_unused_parameters("");
  for (int i = 0; i < 100; ++i) decision.add_dropped_chunks(i);
  EXPECT_EQ(Count<v1::StepDecision>(decision.SerializeAsString()), 5);
  // One by one, as a parser takes them too.
  EXPECT_EQ(Count<v1::StepDecision>(Times(9, std::string("\x38\x01"))), 0);
}

TEST(FieldCount, StopsAtTheMostAndWhereThereIsNoMessage) {
  EXPECT_EQ(Count(Times(500, Field(15, "")), /*most=*/10), 11);
  EXPECT_EQ(Count(Field(1, Times(60, Field(15, ""))), /*most=*/10), 11);
  EXPECT_EQ(Count(Field(15, "") + "\x7a\x7f" + Field(15, "")), 2);
  EXPECT_EQ(Count(Field(15, "") + "\x0c" + Field(15, "")), 1);
  EXPECT_EQ(Count(Field(15, "") + std::string("\x0a\x7f")), 2);
  EXPECT_LE(Count(std::string(100000, '\x0b'), 100000), 1000);  // Groups without an end.
  EXPECT_EQ(Count(""), 0);
}

}  // namespace
}  // namespace ballast::proto::field_count_test
