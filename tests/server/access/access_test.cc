// Every method and every message of a stream, as every role and without one.
#include "server/access/access.h"

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "client/calls/service.h"
#include "client/connect.h"
#include "client/transport/blocking_call.h"
#include "client/transport/handshake.h"
#include "cpu_optimizer_service/state/checkpoint_directory.h"
#include "proto/convert.h"
#include "proto/frame.h"
#include "server/access/method_rules.h"
#include "server/access/tls.h"
#include "server/server.h"
#include "tests/server/access/access_service.h"
#include "tests/server/grpc_refused.h"

namespace ballast::server {
namespace {

using ::google::protobuf::FieldDescriptor;
using ::google::protobuf::Message;
using ::google::protobuf::MethodDescriptor;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

// A caller, and what they are for jobs of the names mine-*.
struct Person {
  std::string name;
  std::shared_ptr<grpc::Channel> channel;
  Role role = Role::kNobody;
  bool is_known = true;
};

// Writes the messages, closes this side, and reads to the end.
absl::Status Call(const Person& person, const MethodDescriptor& method,
                  const std::vector<const Message*>& messages) {
  client::CallsUnderWay calls;
  client::BlockingCall call(person.channel,
                            absl::StrCat("/", method.service()->full_name(), "/", method.name()),
                            kPatience, calls);
  for (const Message* message : messages) {
    const std::string bytes = message->SerializeAsString();
    const grpc::Slice slice(bytes);
    if (!call.Write(grpc::ByteBuffer(&slice, 1))) return call.Finish();
  }
  call.WritesDone();
  grpc::ByteBuffer answer;
  while (call.Read(&answer)) continue;
  return call.Finish();
}

bool IsDenied(const absl::Status& status) {
  return absl::IsPermissionDenied(status) || absl::IsUnauthenticated(status);
}

// Names the job in the message, or in what it has of it. False: there is no place for it.
bool SetJob(const std::string& job, Message& message) {
  const auto& type = *message.GetDescriptor();
  const auto& fields = *message.GetReflection();
  if (const FieldDescriptor* name = type.FindFieldByName("name"); name != nullptr) {
    const std::string parent = type.name() == "UpdateGroupRequest" ? "/groups/decay"
                               : type.name() == "ReadStateRequest" ||
                                       type.name() == "SummarizeStateRequest" ||
                                       type.name() == "OpenWriteState"
                                   ? "/parameters/w"
                                   : "";
    const bool bare = type.name() == "Job";  // The field takes a bare name when it is created, too.
    fields.SetString(&message, name, bare ? job : "jobs/" + job + parent);
    return true;
  }
  // A folder of checkpoints is the job's of its name.
  if (const FieldDescriptor* folder = type.FindFieldByName("directory"); folder != nullptr) {
    fields.SetString(&message, folder, job);
    return true;
  }
  for (const char* part : {"job", "open"}) {
    const FieldDescriptor* field = type.FindFieldByName(part);
    if (field != nullptr && field->message_type() != nullptr) {
      return SetJob(job, *fields.MutableMessage(&message, field));
    }
  }
  return false;
}

class AccessOfMethodsTest : public AccessTest {
 protected:
  std::vector<Person> People() const {
    return {
        {.name = "nobody", .channel = OverTls(""), .is_known = false},
        {.name = "nobody in this process",
         .channel = server_->InProcessChannel(),
         .is_known = false},
        {.name = "an unknown token", .channel = OverTls("unknown"), .is_known = false},
        {.name = "an unknown token of this user",
         .channel = OverUnix("unknown"),
         .is_known = false},
        {.name = "a user without a role", .channel = OverUnix("")},
        {.name = "a certificate without a role", .channel = OverTls("", "mallory")},
        {.name = "viewer", .channel = OverTls("viewer"), .role = Role::kViewer},
        {.name = "viewer of this host", .channel = OverUnix("viewer"), .role = Role::kViewer},
        {.name = "trainer", .channel = OverTls("trainer"), .role = Role::kTrainer},
        {.name = "trainer's certificate", .channel = OverTls("", "alice"), .role = Role::kTrainer},
        {.name = "trainer of this host", .channel = OverUnix("trainer"), .role = Role::kTrainer},
        {.name = "operator", .channel = OverTls("operator"), .role = Role::kOperator},
        {.name = "operator of this host",
         .channel = OverUnix("operator"),
         .role = Role::kOperator}};
  }

  // A first message that names the job, where the method's has such a place.
  static std::unique_ptr<Message> Naming(const MethodDescriptor& method, const std::string& job) {
    std::unique_ptr<Message> message(google::protobuf::MessageFactory::generated_factory()
                                         ->GetPrototype(method.input_type())
                                         ->New());
    const bool named = SetJob(job, *message);
    EXPECT_TRUE(named || method.name() == "ListJobs" || IsOfAllJobs(method))
        << method.full_name() << " names no job; say in the test where it does";
    return message;
  }

  static std::vector<const MethodDescriptor*> Methods() {
    std::vector<const MethodDescriptor*> methods;
    for (const auto* file :
         {v1::Job::descriptor()->file(), v1::TrainRequest::descriptor()->file(),
          v1::Plane_descriptor()->file(), v1::DescribeServiceRequest::descriptor()->file()}) {
      for (int s = 0; s < file->service_count(); ++s) {
        for (int m = 0; m < file->service(s)->method_count(); ++m) {
          methods.push_back(file->service(s)->method(m));
        }
      }
    }
    return methods;
  }
  // It names no job, and takes a role for all that there may be.
  static bool IsOfAllJobs(const MethodDescriptor& method) {
    return method.name() == "DescribeService";
  }
  // A method that has no rule takes an operator, and fails a test of its own.
  static Role NeededFor(const MethodDescriptor& method) {
    return RuleOf(absl::StrCat(method.service()->name(), ".", method.name()))
        .value_or(Role::kOperator);
  }
};

TEST_F(AccessOfMethodsTest, EveryMethodHasARule) {
  EXPECT_GE(Methods().size(), 22u);
  for (const MethodDescriptor* method : Methods()) {
    EXPECT_TRUE(RuleOf(absl::StrCat(method->service()->name(), ".", method->name())).has_value())
        << method->full_name() << " is not in server/access/method_rules.cc";
  }
}

TEST_F(AccessOfMethodsTest, ViewersLookTrainersTrainAndOperatorsDoTheRest) {
  std::map<Role, std::vector<std::string>> methods;
  for (const MethodDescriptor* method : Methods()) {
    methods[NeededFor(*method)].push_back(method->name());
  }
  EXPECT_THAT(methods[Role::kNobody], testing::IsEmpty());
  EXPECT_THAT(methods[Role::kViewer],
              UnorderedElementsAre("GetJob", "ListJobs", "TraceJob", "GetHistory", "ReadWeights",
                                   "ReadState", "SummarizeState", "ListCheckpoints"));
  EXPECT_THAT(methods[Role::kTrainer], UnorderedElementsAre("CreateJob", "AttachWorker", "Train",
                                                            "UploadWeights", "SaveJob"));
}

TEST_F(AccessOfMethodsTest, EveryMethodTakesItsRoleForTheJobThatItNames) {
  for (const Person& person : People()) {
    for (const MethodDescriptor* method : Methods()) {
      const absl::Status mine = Call(person, *method, {Naming(*method, "mine-1").get()});
      const bool lacks_role = IsOfAllJobs(*method) || person.role < NeededFor(*method);
      EXPECT_EQ(IsDenied(mine), (lacks_role && method->name() != "ListJobs") || !person.is_known)
          << person.name << " calls " << method->full_name() << ": " << mine;
      EXPECT_EQ(absl::IsUnauthenticated(mine), !person.is_known)
          << person.name << " calls " << method->full_name() << ": " << mine;
      if (method->name() == "ListJobs" || IsOfAllJobs(*method)) continue;
      const absl::Status other = Call(person, *method, {Naming(*method, "other").get()});
      EXPECT_TRUE(IsDenied(other))
          << person.name << " calls " << method->full_name() << " of another's job: " << other;
      // A job that is not there is no more to see than one that is.
      const absl::Status none = Call(person, *method, {Naming(*method, "not-there").get()});
      EXPECT_TRUE(IsDenied(none)) << person.name << " calls " << method->full_name()
                                  << " of no job: " << none;
    }
  }
}

// An operator of a pattern of jobs is none of the service, also while it has no others.
TEST_F(AccessOfMethodsTest, TheServiceAsAWholeTakesARoleForAllJobs) {
  for (const char* job : {"public", "other"}) {
    v1::CloseJobRequest request;
    request.set_name(absl::StrCat("jobs/", job));
    v1::CloseJobResponse closed;
    grpc::ClientContext context;
    EXPECT_TRUE(
        v1::JobService::NewStub(OverUnix("admin"))->CloseJob(&context, request, &closed).ok());
  }
  const auto describe = [](const std::shared_ptr<grpc::Channel>& channel) {
    v1::ServiceDescription description;
    grpc::ClientContext context;
    return v1::DiagnosticsService::NewStub(channel)->DescribeService(
        &context, v1::DescribeServiceRequest(), &description);
  };
  const grpc::Status refused = describe(OverTls("operator"));
  EXPECT_TRUE(Refused(refused, absl::StatusCode::kPermissionDenied));
  EXPECT_EQ(describe(OverTls("admin")).error_code(), grpc::StatusCode::OK);
}

TEST_F(AccessOfMethodsTest, EveryMessageOfAStreamTakesItsRole) {
  for (const Person& person : People()) {
    for (const MethodDescriptor* method : Methods()) {
      if (!method->client_streaming()) continue;
      ASSERT_EQ(method->input_type()->oneof_decl_count(), 1) << method->full_name();
      const auto& kinds = *method->input_type()->oneof_decl(0);
      for (int k = 0; k < kinds.field_count(); ++k) {
        const std::unique_ptr<Message> message(google::protobuf::MessageFactory::generated_factory()
                                                   ->GetPrototype(method->input_type())
                                                   ->New());
        message->GetReflection()->MutableMessage(message.get(), kinds.field(k));
        const std::string what =
            absl::StrCat(person.name, " sends ", kinds.field(k)->full_name(), ": ");
        const absl::Status first = Call(person, *method, {message.get()});
        EXPECT_EQ(IsDenied(first), person.role < NeededFor(*method)) << what << first;
        // Behind an open of a job that they may not use, and of one that they may.
        const absl::Status other =
            Call(person, *method, {Naming(*method, "other").get(), message.get()});
        EXPECT_TRUE(IsDenied(other)) << what << other;
        const absl::Status mine =
            Call(person, *method, {Naming(*method, "mine-1").get(), message.get()});
        EXPECT_EQ(IsDenied(mine), person.role < NeededFor(*method)) << what << mine;
      }
    }
  }
}

std::vector<std::string> JobsSeenOver(const std::shared_ptr<grpc::Channel>& channel) {
  grpc::ClientContext context;
  v1::ListJobsResponse jobs;
  const grpc::Status status =
      v1::JobService::NewStub(channel)->ListJobs(&context, v1::ListJobsRequest(), &jobs);
  EXPECT_TRUE(status.ok()) << status.error_message();
  std::vector<std::string> names;
  for (const v1::Job& job : jobs.jobs()) names.push_back(job.name());
  return names;
}

TEST_F(AccessTest, ListsTheJobsThatTheCallerMaySee) {
  EXPECT_THAT(JobsSeenOver(OverUnix("viewer")), UnorderedElementsAre("jobs/mine-1", "jobs/public"));
  EXPECT_THAT(JobsSeenOver(OverUnix("")), UnorderedElementsAre("jobs/public"));
  EXPECT_THAT(JobsSeenOver(OverUnix("admin")),
              UnorderedElementsAre("jobs/mine-1", "jobs/public", "jobs/other"));
}

TEST_F(AccessTest, APageOfCheckpointsTellsNothingOfThoseThatTheCallerMayNotSee) {
  const auto names = CheckpointDirectory::Open(PosixFileSystem(), File("checkpoints")).value();
  std::vector<std::string> all;
  const auto make = [&](const std::string& folder, int count) {
    for (int i = 0; i < count; ++i) {
      all.push_back(absl::StrCat(folder, "/step-", i, ".1"));
      // Of nothing that can be loaded, which is listed too.
      std::filesystem::create_directories(names->PathOf(all.back()));
    }
  };
  // Behind each of the caller's folders is another's: one ends a page, and one is more than a page.
  make("mine-1", 1);
  make("other", 4096);
  make("public", 1);
  make(absl::StrCat("theirs-", std::string(93, 'x')), 4097);
  Engine engine({.memory_limit_bytes = kTestMemoryBytes, .threads = 1, .checkpoints = names.get()});
  const auto server =
      Server::Start(engine, {.listen = {"unix:" + File("other-socket")},
                             .access = {.roles = File("roles"), .tokens = File("tokens")}})
          .value();
  const auto page = [&](const std::string& who, const std::string& token,
                        v1::ListCheckpointsResponse& response) {
    grpc::ClientContext context;
    v1::ListCheckpointsRequest request;
    request.set_page_token(token);
    return v1::StateService::NewStub(
               client::Connect(server->addresses()[0], kPatience, {.token_file = File(who)})
                   .value())
        ->ListCheckpoints(&context, request, &response);
  };
  std::string tokens;  // Of all pages.
  const auto list = [&](const std::string& who) {
    std::vector<std::string> seen;
    std::string token;
    int pages = 0;
    do {
      v1::ListCheckpointsResponse response;
      const grpc::Status status = page(who, token, response);
      EXPECT_TRUE(status.ok()) << status.error_message();
      for (const v1::Checkpoint& each : response.checkpoints()) seen.push_back(each.name());
      token = response.next_page_token();
      tokens += token + " ";
    } while (!token.empty() && ++pages < 100);
    EXPECT_EQ(token, "");
    return seen;
  };
  EXPECT_EQ(list("viewer"), (std::vector<std::string>{"mine-1/step-0.1", "public/step-0.1"}));
  EXPECT_THAT(tokens, testing::Not(testing::AnyOf(HasSubstr("other"), HasSubstr("theirs"))));
  std::vector<std::string> seen = list("admin");
  std::sort(seen.begin(), seen.end());
  std::sort(all.begin(), all.end());
  EXPECT_EQ(seen, all);
  // Whether there is such a one or not.
  for (const char* token : {"other/step-0.1", "other/step-9999.1"}) {
    v1::ListCheckpointsResponse response;
    EXPECT_EQ(page("viewer", token, response).error_code(), grpc::StatusCode::ABORTED) << token;
  }
}

TEST_F(AccessTest, ATokenComesBeforeACertificateAndAUser) {
  EXPECT_EQ(GetJobOver(OverTls("viewer", "mallory")).error_code(), grpc::StatusCode::OK);
  EXPECT_EQ(GetJobOver(OverTls("unknown", "alice")).error_code(),
            grpc::StatusCode::UNAUTHENTICATED);
  // No part of a token is one, and no other words are.
  EXPECT_EQ(GetJobOver(OverUnix(""), TokenOf("viewer")).error_code(), grpc::StatusCode::OK);
  for (const char* wrong : {"", "the-token-of-viewe", "the-token-of-viewer ", "viewer"}) {
    grpc::ClientContext context;
    context.AddMetadata("authorization", absl::StrCat("Bearer ", wrong));
    v1::ListJobsResponse jobs;
    EXPECT_EQ(v1::JobService::NewStub(OverUnix(""))
                  ->ListJobs(&context, v1::ListJobsRequest(), &jobs)
                  .error_code(),
              grpc::StatusCode::UNAUTHENTICATED)
        << wrong;
  }
}

// However the file of tokens comes to have the digest of nothing: no header stands for a token.
TEST_F(AccessTest, AHeaderWithoutATokenIsNoToken) {
  for (const char* header : {"Bearer ", "Bearer", "", "Basic dXNlcjo=", "the-token-of-viewer"}) {
    grpc::ClientContext context;
    context.AddMetadata("authorization", header);
    v1::ListJobsResponse jobs;
    const grpc::Status status =
        v1::JobService::NewStub(OverUnix(""))->ListJobs(&context, v1::ListJobsRequest(), &jobs);
    EXPECT_TRUE(Refused(status, absl::StatusCode::kUnauthenticated)) << header;
  }
}

TEST_F(AccessTest, AClientSendsTheTokenThatItsFileHasNow) {
  WritePrivateFile(File("mine"), TokenOf("unknown"));
  const std::shared_ptr<grpc::Channel> channel = OverTls("mine");
  EXPECT_EQ(GetJobOver(channel).error_code(), grpc::StatusCode::UNAUTHENTICATED);
  WritePrivateFile(File("mine"), TokenOf("viewer"));
  EXPECT_EQ(GetJobOver(channel).error_code(), grpc::StatusCode::OK);
  WritePrivateFile(File("mine"), "no token of one word");  // The last good one stays.
  EXPECT_EQ(GetJobOver(channel).error_code(), grpc::StatusCode::OK);
}

TEST_F(AccessTest, AClientRefusesACertificateOfAnotherHost) {
  const auto server = Server::Start(engine_, {.listen = {"127.0.0.2:0"},
                                              .access = {.tls_certificate = File("server.pem"),
                                                         .tls_key = File("server.key")}})
                          .value();
  EXPECT_TRUE(Refused(
      client::Connect(server->addresses()[0], kPatience, {.tls_ca = authority_->certificate()})
          .status(),
      absl::StatusCode::kUnavailable));
}

TEST_F(AccessTest, CredentialsThatDoNotBelongTogetherAreRefusedBeforeACall) {
  const auto error = [](const std::string& target, const client::Credentials& given) {
    return client::NewChannel(target, given).status();
  };
  const std::string tcp = "127.0.0.1:1";
  EXPECT_TRUE(
      Refused(error(tcp, {.token_file = File("viewer")}), absl::StatusCode::kInvalidArgument));
  EXPECT_TRUE(
      Refused(error(tcp, {.tls_ca = authority_->certificate(), .tls_cert = File("alice.pem")}),
              absl::StatusCode::kInvalidArgument));
  EXPECT_TRUE(Refused(error(tcp, {.tls_cert = File("alice.pem"), .tls_key = File("alice.key")}),
                      absl::StatusCode::kInvalidArgument));
  EXPECT_TRUE(
      Refused(error(tcp, {.tls_ca = File("gone.pem")}), absl::StatusCode::kInvalidArgument));
  EXPECT_TRUE(
      Refused(error("unix:/x", {.token_file = File("gone")}), absl::StatusCode::kInvalidArgument));

  ASSERT_EQ(setenv("BALLAST_TLS_CA", "of the environment", 1), 0);
  ASSERT_EQ(setenv("BALLAST_TOKEN_FILE", "of the environment", 1), 0);
  const client::Credentials both = client::OrEnvironment({.token_file = "given"});
  unsetenv("BALLAST_TLS_CA");
  unsetenv("BALLAST_TOKEN_FILE");
  EXPECT_EQ(both.tls_ca, "of the environment");
  EXPECT_EQ(both.token_file, "given");
}

TEST_F(AccessTest, FilesThatBecomeWrongChangeNothing) {
  const AccessOptions files = {.tls_certificate = File("server.pem"),
                               .tls_key = File("server.key"),
                               .tls_client_ca = authority_->certificate(),
                               .roles = File("roles"),
                               .tokens = File("tokens")};
  const auto ignore = [](const std::string&) {};
  const auto access = Access::Open(files, ignore, ignore).value();
  const auto tls = Tls::Open(files).value();
  WritePrivateFile(File("roles"), "admin * cert:mallory\n");
  EXPECT_TRUE(Refused(access->ReadAgain(), absl::StatusCode::kInvalidArgument));
  EXPECT_TRUE(access->Knows("cert:alice"));
  WritePrivateFile(File("roles"), "viewer * cert:mallory\n");
  EXPECT_EQ(access->ReadAgain(), absl::OkStatus());
  EXPECT_FALSE(access->Knows("cert:alice"));

  // A certificate whose key has not come yet.
  authority_->Issue("next", {.common_name = "server"});
  std::filesystem::rename(File("next.pem"), File("server.pem"));
  EXPECT_TRUE(Refused(tls->ReadAgain(), absl::StatusCode::kInvalidArgument));
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort("127.0.0.1:0", tls->credentials(), &port);
  v1::JobService::CallbackService service;
  builder.RegisterService(&service);
  const auto server = builder.BuildAndStart();
  EXPECT_EQ(client::Connect(absl::StrCat("127.0.0.1:", port), kPatience,
                            {.tls_ca = authority_->certificate()})
                .status(),
            absl::OkStatus());
}

// However it comes that the system takes only a part of it.
TEST_F(AccessTest, ACertificateThatIsNotCopiedWholeIsAnError) {
  const auto tls = Tls::Open({.tls_certificate = File("server.pem"),
                              .tls_key = File("server.key"),
                              .tls_client_ca = authority_->certificate()})
                       .value();
  const auto usual = signal(SIGXFSZ, SIG_IGN);  // As ballastd does.
  rlimit before = {};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit small = {.rlim_cur = 16, .rlim_max = before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const absl::Status read = tls->ReadAgain();
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  signal(SIGXFSZ, usual);
  EXPECT_TRUE(Refused(read, absl::StatusCode::kUnknown));
  EXPECT_EQ(tls->ReadAgain(), absl::OkStatus());
}

TEST_F(AccessTest, AClientThatTrustsAnotherAuthorityIsToldSoAtOnce) {
  const TestAuthority other(folder_, "other-ca");
  const absl::Time begin = absl::Now();
  const absl::Status refused =
      client::Connect(server_->addresses()[1], absl::Minutes(10),
                      {.tls_ca = other.certificate(), .token_file = File("viewer")})
          .status();
  EXPECT_LT(absl::Now() - begin, absl::Minutes(2));
  EXPECT_TRUE(Refused(refused, absl::StatusCode::kUnavailable));
  // One that is not there yet is waited for.
  EXPECT_TRUE(Refused(
      client::Connect("127.0.0.1:1", absl::Seconds(1), {.tls_ca = authority_->certificate()})
          .status(),
      absl::StatusCode::kUnavailable));
}

// Time that goes on in sleeps alone, or never.
class SleepClock final : public client::Clock {
 public:
  explicit SleepClock(std::function<void()> on_sleep = nullptr) : on_sleep_(std::move(on_sleep)) {}
  absl::Time Now() override { return now_; }
  void SleepFor(absl::Duration duration) override {
    absl::SleepFor(duration);
    on_sleep_ == nullptr ? void(now_ += duration) : on_sleep_();
  }
  void WaitFor(Mutex&, CondVar&, absl::Duration) override {}

 private:
  const std::function<void()> on_sleep_;
  absl::Time now_ = absl::UnixEpoch();
};

TEST_F(AccessTest, AToolThatWaitsDoesSoWhileCertificatesAreChanged) {
  const TestAuthority other(folder_, "other-ca");
  const client::Credentials files = {.tls_ca = File("trusted"), .token_file = File("viewer")};
  const auto list = [&](client::Clock& clock) {
    std::filesystem::copy_file(other.certificate(), files.tls_ca,
                               std::filesystem::copy_options::overwrite_existing);
    const std::string& target = server_->addresses()[1];
    return client::Service(target, client::NewChannel(target, files).value(), files, kPatience,
                           absl::Hours(1), clock)
        .Call<v1::ListJobsResponse>("JobService/ListJobs", v1::ListJobsRequest())
        .status();
  };
  SleepClock goes_on;
  const absl::Status refused = list(goes_on);
  EXPECT_TRUE(Refused(refused, absl::StatusCode::kFailedPrecondition));
  EXPECT_GE(goes_on.Now(), absl::UnixEpoch() + client::kRotation);

  SleepClock stands([&] {
    std::filesystem::copy_file(authority_->certificate(), files.tls_ca,
                               std::filesystem::copy_options::overwrite_existing);
  });
  EXPECT_EQ(list(stands), absl::OkStatus());
}

TEST_F(AccessTest, AClientThatTheServiceDoesNotKnowIsToldSoAtOnce) {
  const auto server =
      Server::Start(engine_, {.listen = {"127.0.0.1:0"},
                              .access = {.tls_certificate = File("server.pem"),
                                         .tls_key = File("server.key"),
                                         .tls_client_ca = authority_->certificate()}})
          .value();
  const std::string target = server->addresses()[0];
  TestAuthority(folder_, "other-ca").Issue("stranger", {.common_name = "alice"});
  const client::Credentials none = {.tls_ca = authority_->certificate()};
  client::Credentials unknown = none;
  unknown.tls_cert = File("stranger.pem"), unknown.tls_key = File("stranger.key");
  const absl::Time begin = absl::Now();
  const auto error = [&](const client::Credentials& given) {
    return client::Connect(target, absl::Minutes(10), given).status();
  };
  EXPECT_TRUE(Refused(error(unknown), absl::StatusCode::kUnavailable));
  EXPECT_TRUE(Refused(error(none), absl::StatusCode::kUnavailable));
  EXPECT_LT(absl::Now() - begin, absl::Minutes(4));
  client::Credentials known = none;
  known.tls_cert = File("alice.pem"), known.tls_key = File("alice.key");
  EXPECT_EQ(client::Connect(target, kPatience, known).status(), absl::OkStatus());
}

TEST_F(AccessTest, NewConnectionsUseTheCertificatesThatTheFilesHaveNow) {
  const std::shared_ptr<grpc::Channel> before = OverTls("viewer");
  const TestAuthority other(folder_, "other-ca");
  other.Issue("server", {.common_name = "server"});
  const client::Credentials of_other = {.tls_ca = other.certificate(),
                                        .token_file = File("viewer")};
  const absl::Time deadline = absl::Now() + kPatience;
  absl::Status connected;
  // The files are looked at once a second. Later attempts take longer, as handshakes may.
  for (absl::Duration limit = absl::Milliseconds(200);; limit = 2 * limit) {
    connected = client::Connect(server_->addresses()[1], limit, of_other).status();
    if (connected.ok() || absl::Now() >= deadline) break;
  }
  EXPECT_EQ(connected, absl::OkStatus());
  EXPECT_EQ(GetJobOver(before).error_code(), grpc::StatusCode::OK);
  const absl::Status old =
      client::Connect(server_->addresses()[1], kPatience,
                      {.tls_ca = authority_->certificate(), .token_file = File("viewer")})
          .status();
  EXPECT_TRUE(Refused(old, absl::StatusCode::kUnavailable));
}

}  // namespace
}  // namespace ballast::server
