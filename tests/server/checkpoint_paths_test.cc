// Who may have the service write and read where.
#include "server/checkpoint_paths.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "client/connect.h"
#include "client/session.h"
#include "cpu_optimizer_service/common/reason.h"
#include "proto/convert.h"
#include "server/server.h"
#include "tests/server/grpc_refused.h"
#include "tests/server/tiny_job.h"

namespace ballast::server {
namespace {

namespace fs = std::filesystem;

class CheckpointPathsTest : public testing::Test {
 protected:
  CheckpointPathsTest() { fs::create_directories(root_); }
  ~CheckpointPathsTest() override { fs::remove_all(root_); }

  // Not in TempDir(), which may be deep: the path of a socket has at most 107 characters.
  const std::string root_ = "/tmp/ballast_paths." + std::to_string(getpid());
  const std::unique_ptr<CheckpointDirectory> names_ =
      CheckpointDirectory::Open(PosixFileSystem(), root_ + "/named").value();
  Engine engine_{
      {.memory_limit_bytes = kTestMemoryBytes, .threads = 1, .checkpoints = names_.get()}};
};

TEST_F(CheckpointPathsTest, ANameIsAFolderAndNothingElse) {
  const CheckpointPaths paths(names_.get(), /*allow_paths=*/true, {});
  EXPECT_EQ(paths.Resolve("gpt-2", "ipv4:127.0.0.1:1").value(), root_ + "/named/gpt-2");
  EXPECT_EQ(paths.Resolve("gpt-2/step-7.1", "ipv4:127.0.0.1:1").value(),
            root_ + "/named/gpt-2/step-7.1");
  EXPECT_EQ(paths.Resolve("/else/where", "ipv4:127.0.0.1:1").value(), "/else/where");
  for (const std::string& bad :
       {std::string(), std::string(".."), std::string("a/b"), std::string("../gpt"),
        std::string("gpt/.."), std::string("gpt/step-1.1/x"), std::string("../step-1.1"),
        std::string(".hidden"), std::string("a\0b", 3), std::string("/a\0b", 4),
        "/" + std::string(5000, 'a'), std::string(200, 'a')}) {
    EXPECT_EQ(paths.Resolve(bad, "ipv4:127.0.0.1:1").status().code(),
              absl::StatusCode::kInvalidArgument)
        << bad;
  }
  const CheckpointPaths nameless(nullptr, /*allow_paths=*/true, {});
  EXPECT_TRUE(Refused(nameless.Resolve("gpt", "unix:"), absl::StatusCode::kFailedPrecondition,
                      reason::kNoCheckpointDir));
}

// A job in the server, and what is said of a save of it to a path and to a name.
struct Said {
  grpc::Status path;
  grpc::Status name;
};
Said SaveOver(const std::shared_ptr<grpc::Channel>& channel, const std::string& path) {
  const auto save = [&](const std::string& directory) {
    grpc::ClientContext context;
    v1::SaveJobRequest request;
    request.set_name("jobs/tiny");
    request.set_directory(directory);
    v1::SaveJobResponse response;
    return v1::StateService::NewStub(channel)->SaveJob(&context, request, &response);
  };
  return {.path = save(path), .name = save("tiny")};
}

void GiveWeights(Job& job) {
  for (size_t chunk = 0; chunk < job.layout().chunks().size(); ++chunk) {
    const std::vector<std::byte> zeros(job.layout().chunks()[chunk].elements * sizeof(float));
    const absl::Span<const std::byte> piece(zeros);
    ASSERT_TRUE(job.WriteInitialWeights(static_cast<int64_t>(chunk), {&piece, 1}).ok());
  }
}

TEST_F(CheckpointPathsTest, PathsAreForThoseWhoCouldWriteThereThemselves) {
  const auto job = engine_.CreateJob(proto::FromProto(TinyJob("tiny")).value()).value();
  GiveWeights(*job);
  const std::string socket = root_ + "/socket";
  const auto server = Server::Start(engine_, {.listen = {"127.0.0.1:0", "unix:" + socket}}).value();
  const auto channel_to = [&](const std::string& address) {
    return client::Connect(address).value();
  };
  const auto tcp = channel_to(server->addresses()[0]);
  const auto local = channel_to("unix:" + socket);
  ASSERT_EQ(chmod(socket.c_str(), 0755), 0);

  const Said over_tcp = SaveOver(tcp, root_ + "/tcp");
  EXPECT_TRUE(Refused(over_tcp.path, absl::StatusCode::kPermissionDenied));
  EXPECT_FALSE(fs::exists(root_ + "/tcp"));
  EXPECT_TRUE(over_tcp.name.ok()) << over_tcp.name.error_message();
  EXPECT_TRUE(fs::exists(root_ + "/named/tiny/step-0.1/index.json"));
  // A load says nothing of what is there.
  grpc::ClientContext context;
  v1::LoadJobRequest load;
  load.set_name("jobs/tiny");
  load.set_directory(root_ + "/named/tiny");
  v1::LoadJobResponse loaded;
  EXPECT_EQ(v1::StateService::NewStub(tcp)->LoadJob(&context, load, &loaded).error_code(),
            grpc::StatusCode::PERMISSION_DENIED);

  const Said over_socket = SaveOver(local, root_ + "/local");
  EXPECT_TRUE(over_socket.path.ok()) << over_socket.path.error_message();
  EXPECT_TRUE(fs::exists(root_ + "/local/step-0.1/index.json"));
  // Another user may connect to it now.
  ASSERT_EQ(chmod(socket.c_str(), 0777), 0);
  EXPECT_EQ(SaveOver(local, root_ + "/open").path.error_code(),
            grpc::StatusCode::PERMISSION_DENIED);

  const auto unreachable = Server::Start(engine_, {.listen = {}}).value();
  const Said in_process = SaveOver(unreachable->InProcessChannel(), root_ + "/in_process");
  EXPECT_TRUE(in_process.path.ok()) << in_process.path.error_message();
  const auto open =
      Server::Start(engine_, {.listen = {"127.0.0.1:0"}, .allow_paths = true}).value();
  const Said allowed = SaveOver(channel_to(open->addresses()[0]), root_ + "/allowed");
  EXPECT_TRUE(allowed.path.ok()) << allowed.path.error_message();
}

TEST_F(CheckpointPathsTest, ACheckpointIsDeletedByItsNameAndByThosePathsThatTheServiceTakes) {
  const auto job = engine_.CreateJob(proto::FromProto(TinyJob("tiny")).value()).value();
  GiveWeights(*job);
  ASSERT_TRUE(job->Save(names_->PathOf("tiny")).ok());
  fs::create_directories(root_ + "/elsewhere");
  ASSERT_TRUE(job->Save(root_ + "/elsewhere/tiny").ok());
  const auto server = Server::Start(engine_, {.listen = {"127.0.0.1:0"}}).value();
  const auto tcp = client::Connect(server->addresses()[0]).value();
  const auto remove = [](const auto& channel, const std::string& checkpoint,
                         const std::string& uid = "") {
    return client::Session::DeleteCheckpoint(channel, checkpoint, uid).code();
  };
  using Code = absl::StatusCode;
  EXPECT_EQ(remove(tcp, "tiny"), Code::kInvalidArgument);
  EXPECT_EQ(remove(tcp, "tiny/../tiny/step-0.1"), Code::kInvalidArgument);
  EXPECT_EQ(remove(tcp, root_ + "/named/tiny/step-0.1"), Code::kPermissionDenied);
  EXPECT_EQ(remove(tcp, "tiny/step-0", "another"), Code::kNotFound);
  EXPECT_EQ(remove(tcp, "tiny/step-1"), Code::kNotFound);
  EXPECT_TRUE(fs::exists(root_ + "/named/tiny/step-0.1/index.json"));
  EXPECT_EQ(remove(tcp, "tiny/step-0", job->uid()), Code::kOk);
  EXPECT_EQ(remove(tcp, "tiny/step-0", job->uid()), Code::kNotFound);
  EXPECT_FALSE(fs::exists(root_ + "/named/tiny/step-0.1"));
  const auto unreachable = Server::Start(engine_, {.listen = {}}).value();
  EXPECT_EQ(remove(unreachable->InProcessChannel(), root_ + "/elsewhere/tiny/step-0.1"), Code::kOk);
  EXPECT_FALSE(fs::exists(root_ + "/elsewhere/tiny/step-0.1"));
}

TEST_F(CheckpointPathsTest, WhoeverCreatesAJobIsToldOfACheckpointOfItsName) {
  const auto create = [&] {
    const auto server = Server::Start(engine_, {.listen = {}}).value();
    grpc::ClientContext context;
    v1::CreateJobRequest request;
    *request.mutable_job() = TinyJob("tiny");
    v1::Job job;
    EXPECT_TRUE(v1::JobService::NewStub(server->InProcessChannel())
                    ->CreateJob(&context, request, &job)
                    .ok());
    return job;
  };
  EXPECT_FALSE(create().has_found_checkpoint());
  const auto job = engine_.FindJob("tiny").value();
  GiveWeights(*job);
  ASSERT_TRUE(job->Save(names_->PathOf("tiny")).ok());
  ASSERT_TRUE(engine_.CloseJob("tiny").ok());
  const v1::Job again = create();
  EXPECT_EQ(again.found_checkpoint().directory(), root_ + "/named/tiny/step-0.1");
  EXPECT_EQ(again.found_checkpoint().uid(), job->uid());
  EXPECT_EQ(again.phase(), v1::AWAITING_WEIGHTS);

  // Closing by uid closes no other job of the name.
  const auto server = Server::Start(engine_, {.listen = {}}).value();
  const auto close = [&](const std::string& uid) {
    grpc::ClientContext context;
    v1::CloseJobRequest request;
    request.set_name("jobs/tiny");
    request.set_uid(uid);
    v1::CloseJobResponse response;
    return v1::JobService::NewStub(server->InProcessChannel())
        ->CloseJob(&context, request, &response)
        .error_code();
  };
  EXPECT_EQ(close(job->uid()), grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(close(again.uid()), grpc::StatusCode::OK);
}

TEST_F(CheckpointPathsTest, CheckpointsAreListedInPages) {
  // Of nothing that can be loaded, which is listed too. One folder alone is more than a page.
  const std::string large(100, 'a');
  std::vector<std::string> expected;
  const auto make = [&](const std::string& folder, int count) {
    for (int i = 0; i < count; ++i) {
      expected.push_back(folder + "/step-" + std::to_string(i) + ".1");
      fs::create_directories(names_->PathOf(expected.back()));
    }
  };
  make(large, 8000);
  make("b", 1);
  make("c", 4096);
  make("d", 1);
  std::sort(expected.begin(), expected.end());
  const auto server = Server::Start(engine_, {.listen = {"127.0.0.1:0"}}).value();
  const auto state =
      v1::StateService::NewStub(client::Connect(server->addresses().front()).value());
  const auto page = [&](const v1::ListCheckpointsRequest& request,
                        v1::ListCheckpointsResponse& response) {
    grpc::ClientContext context;
    return state->ListCheckpoints(&context, request, &response);
  };
  const auto list = [&](const std::string& directory) {
    v1::ListCheckpointsRequest request;
    request.set_directory(directory);
    std::vector<std::string> names;
    std::vector<int> pages;
    do {
      v1::ListCheckpointsResponse response;
      const grpc::Status status = page(request, response);
      EXPECT_TRUE(status.ok()) << status.error_message();
      EXPECT_LT(response.ByteSizeLong(), size_t{4} << 20);
      for (const v1::Checkpoint& each : response.checkpoints()) names.push_back(each.name());
      pages.push_back(response.checkpoints_size());
      request.set_page_token(response.next_page_token());
    } while (!request.page_token().empty() && pages.size() < 100);
    EXPECT_GE(pages.size(), 2);
    std::sort(names.begin(), names.end());
    return names;
  };
  EXPECT_EQ(list(""), expected);
  expected.resize(8000);
  EXPECT_EQ(list(large), expected);

  v1::ListCheckpointsRequest request;
  request.set_page_token(large + "/step-8000.1");
  v1::ListCheckpointsResponse response;
  const grpc::Status gone = page(request, response);
  EXPECT_TRUE(Refused(gone, absl::StatusCode::kAborted));

  grpc::ClientContext context;
  v1::VerifyCheckpointsRequest verify;
  verify.set_directory(large);
  const grpc::Status many = state->VerifyCheckpoints(&context, verify, &response);
  EXPECT_TRUE(Refused(many, absl::StatusCode::kFailedPrecondition));
}

}  // namespace
}  // namespace ballast::server
