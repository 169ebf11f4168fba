// What the log says of calls that change something, and of calls that are refused.
#include <gmock/gmock.h>

#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/strip.h"
#include "proto/frame.h"
#include "tests/server/access/access_service.h"
#include "tests/server/grpc_refused.h"

namespace ballast::server {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;
using ::testing::StartsWith;

constexpr char kForged[] = "x\ninfo audit: user:0 from unix:: JobService.CloseJob: done\x1b[2K";

class AuditTest : public AccessTest {
 protected:
  using Channel = std::shared_ptr<grpc::Channel>;

  static grpc::StatusCode Close(const Channel& channel, const std::string& job) {
    v1::CloseJobRequest request;
    request.set_name("jobs/" + job);
    v1::CloseJobResponse response;
    grpc::ClientContext context;
    return v1::JobService::NewStub(channel)->CloseJob(&context, request, &response).error_code();
  }
  static grpc::StatusCode Undo(const Channel& channel, const std::string& job) {
    v1::UndoStepRequest request;
    request.set_name("jobs/" + job);
    v1::UndoStepResponse response;
    grpc::ClientContext context;
    return v1::JobService::NewStub(channel)->UndoStep(&context, request, &response).error_code();
  }
  static grpc::StatusCode UpdateGroup(const Channel& channel, const std::string& group) {
    v1::UpdateGroupRequest request;
    request.set_name(group);
    request.mutable_changes()->set_lr(0.5);
    v1::ParamGroup response;
    grpc::ClientContext context;
    return v1::JobService::NewStub(channel)->UpdateGroup(&context, request, &response).error_code();
  }
  static grpc::StatusCode Load(const Channel& channel, const std::string& directory) {
    v1::LoadJobRequest request;
    request.set_name("jobs/mine-1");
    request.set_directory(directory);
    v1::LoadJobResponse response;
    grpc::ClientContext context;
    return v1::StateService::NewStub(channel)->LoadJob(&context, request, &response).error_code();
  }
};

TEST_F(AuditTest, SaysWhoChangedWhatFromWhere) {
  EXPECT_EQ(UpdateGroup(OverTls("operator"), "jobs/mine-1/groups/decay"), grpc::StatusCode::OK);
  EXPECT_EQ(Close(OverUnix("admin"), "other"), grpc::StatusCode::OK);
  EXPECT_THAT(
      Logged("audit:"),
      ElementsAre(
          AllOf(StartsWith("info audit: token:operator from ipv4:127.0.0.1:"),
                HasSubstr(
                    ": JobService.UpdateGroup name: \"jobs/mine-1/groups/decay\" changes { lr: "),
                testing::EndsWith(": done\n")),
          AllOf(StartsWith("info audit: token:admin from unix:"),
                HasSubstr(": JobService.CloseJob name: \"jobs/other\": done"))));
}

TEST_F(AuditTest, SaysWhatFailedAndWhatWasRefusedToAnOperator) {
  EXPECT_EQ(Undo(OverTls("operator"), "mine-1"), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(Close(OverTls("operator"), "other"), grpc::StatusCode::PERMISSION_DENIED);
  EXPECT_EQ(Load(OverTls("operator"), "other"), grpc::StatusCode::PERMISSION_DENIED);
  for (const std::string& line : Logged("audit:")) {
    EXPECT_TRUE(
        Says(absl::StripSuffix(line.substr(line.find(": ", line.find("from ")) + 2), "\n")));
  }
}

// Callers that are operators of nothing could fill the log: they are counted.
TEST_F(AuditTest, CallsThatAreNotAdmittedAreCountedAndNamed) {
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(Close(OverUnix("viewer"), "mine-1"), grpc::StatusCode::PERMISSION_DENIED);
    EXPECT_EQ(Close(OverUnix("unknown"), "mine-1"), grpc::StatusCode::UNAUTHENTICATED);
  }
  EXPECT_THAT(Logged("audit:"), IsEmpty());
  const std::vector<std::string> refused = Logged("warning refused ");
  ASSERT_THAT(refused, Not(IsEmpty()));
  EXPECT_THAT(refused[0],
              AllOf(StartsWith("warning refused 1 calls, the last one JobService.CloseJob of "
                               "token:viewer from unix:"),
                    HasSubstr(": token:viewer ")));
}

TEST_F(AuditTest, IsWrittenAtEveryLevelOfTheLog) {
  spdlog::default_logger()->set_level(spdlog::level::off);
  EXPECT_EQ(Close(OverUnix("admin"), "other"), grpc::StatusCode::OK);
  EXPECT_EQ(Close(OverUnix("viewer"), "mine-1"), grpc::StatusCode::PERMISSION_DENIED);
  EXPECT_THAT(log_->last_formatted(), ElementsAre(StartsWith("info audit: token:admin ")));
}

TEST_F(AuditTest, NamesThatAClientMakesUpForgeNoLineAndFillNoLog) {
  const std::string large(proto::kMaxRequestBytes - 100, 'n');
  size_t seen = 0;
  for (const std::string& name : {std::string(kForged), large}) {
    v1::GetJobRequest get;
    get.set_name("jobs/" + name);
    v1::Job job;
    grpc::ClientContext context;
    const grpc::Status status =
        v1::JobService::NewStub(OverUnix("viewer"))->GetJob(&context, get, &job);
    EXPECT_TRUE(Refused(status, absl::StatusCode::kInvalidArgument));
    EXPECT_THAT(log_->last_formatted(), SizeIs(seen));  // It says nothing of roles.
    EXPECT_EQ(Close(OverUnix("operator"), name), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_EQ(UpdateGroup(OverUnix("operator"), "jobs/mine-1/groups/" + name),
              grpc::StatusCode::NOT_FOUND);
    EXPECT_NE(Load(OverUnix("operator"), "/" + name), grpc::StatusCode::OK);
    const std::vector<std::string> lines = log_->last_formatted();
    ASSERT_THAT(lines, SizeIs(seen + 3));
    for (; seen < lines.size(); ++seen) {
      EXPECT_THAT(lines[seen], StartsWith("info audit: token:operator from unix:"));
      EXPECT_EQ(lines[seen].find_first_of("\n\x1b"), lines[seen].size() - 1) << lines[seen];
      EXPECT_LT(lines[seen].size(), 3000u);
    }
  }
}

TEST_F(AuditTest, ARequestThatIsTooLargeIsAShortLineWithoutTheRequest) {
  EXPECT_EQ(Close(OverUnix("operator"), std::string(size_t{8} << 20, 'n')),
            grpc::StatusCode::INVALID_ARGUMENT);
  const std::vector<std::string> lines = log_->last_formatted();
  ASSERT_THAT(lines, SizeIs(1));
  EXPECT_THAT(lines[0], AllOf(StartsWith("info audit: token:operator from unix:"),
                              HasSubstr(": JobService.CloseJob: the request is too large")));
  EXPECT_LT(lines[0].size(), 500u);
}

}  // namespace
}  // namespace ballast::server
