// A service that asks who calls, and callers of every kind.
#ifndef BALLAST_TESTS_SERVER_ACCESS_ACCESS_SERVICE_H_
#define BALLAST_TESTS_SERVER_ACCESS_ACCESS_SERVICE_H_

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <spdlog/sinks/ringbuffer_sink.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "ballast/v1/jobs.grpc.pb.h"
#include "client/connect.h"
#include "client/credentials.h"
#include "client/transport/blocking_call.h"
#include "server/access/access.h"
#include "server/server.h"
#include "server/status/diagnostics_service.h"
#include "tests/server/tiny_job.h"
#include "tests/support/certificates.h"

namespace ballast::server {

// For what takes milliseconds; a busy machine may take long.
inline constexpr absl::Duration kPatience = absl::Minutes(2);

inline constexpr char kRoles[] =
    "# Who may do what with the jobs that this test has made.\n"
    "viewer    mine-*  token:viewer\n"
    "trainer   mine-*  token:trainer\n"
    "operator  mine-*  token:operator\n"
    "trainer   mine-*  cert:alice\n"
    "\n"
    "viewer    public  *\n"
    "operator  *       token:admin\n";

inline std::string TokenOf(const std::string& name) { return "the-token-of-" + name; }

inline std::string TokenLine(const std::string& name) {
  const TokenDigest digest = DigestOf(TokenOf(name));
  return absl::StrCat(name, " ",
                      absl::BytesToHexString(absl::string_view(
                          reinterpret_cast<const char*>(digest.data()), digest.size())),
                      "\n");
}

// A service with roles, reached over a unix socket and over TLS, by callers with tokens, a certificate
// or nothing.
class AccessTest : public testing::Test {
 protected:
  AccessTest()
      : folder_(absl::StrCat("/tmp/ballast_access.", getpid(), ".", ++made_)),
        engine_({.memory_limit_bytes = kTestMemoryBytes, .threads = 2}),
        diagnostics_(engine_, {}) {
    log_->set_pattern("%l %v");
    spdlog::set_default_logger(std::make_shared<spdlog::logger>("test", log_));
    std::filesystem::create_directories(folder_);
    authority_.emplace(folder_, "ca");
    authority_->Issue("server", {.common_name = "server"});
    authority_->Issue("alice", {.common_name = "alice"});
    authority_->Issue("mallory", {.common_name = "mallory"});
    for (const char* name : {"viewer", "trainer", "operator", "admin", "unknown"}) {
      WritePrivateFile(File(name), TokenOf(name) + "\n");
    }
    WritePrivateFile(File("roles"), kRoles);
    WriteTokens({"viewer", "trainer", "operator", "admin"});
    server_ = Server::Start(engine_, {.listen = {"unix:" + File("socket"), "127.0.0.1:0"},
                                      .access = {.tls_certificate = File("server.pem"),
                                                 .tls_key = File("server.key"),
                                                 .tls_client_ca = authority_->certificate(),
                                                 .roles = File("roles"),
                                                 .tokens = File("tokens")},
                                      .more_services = {&diagnostics_}})
                  .value();
    diagnostics_.Describes(*server_);
    for (const char* job : {"mine-1", "public", "other"}) Create(TinyJob(job));
  }
  ~AccessTest() override {
    server_.reset();
    spdlog::set_default_logger(before_);
    std::filesystem::remove_all(folder_);
  }

  std::string File(const std::string& name) const { return folder_ + "/" + name; }
  void Create(const v1::Job& job) const {
    v1::CreateJobRequest request;
    *request.mutable_job() = job;
    v1::Job created;
    grpc::ClientContext context;
    const grpc::Status status =
        v1::JobService::NewStub(OverUnix("admin"))->CreateJob(&context, request, &created);
    EXPECT_TRUE(status.ok()) << status.error_message();
  }
  void WriteTokens(const std::vector<std::string>& names) {
    std::string lines;
    for (const std::string& name : names) lines += TokenLine(name);
    WritePrivateFile(File("tokens"), lines);
  }

  std::shared_ptr<grpc::Channel> OverUnix(const std::string& token) const {
    return Connect(0, {.token_file = token.empty() ? "" : File(token)});
  }
  std::shared_ptr<grpc::Channel> OverTls(const std::string& token,
                                         const std::string& certificate = "") const {
    return Connect(1, ForTls(token, certificate));
  }
  // With a window that stays as small as it begins: what is not read stays with the service, also
  // where gRPC's estimates on a busy machine would let it send megabytes.
  std::shared_ptr<grpc::Channel> OverTlsInASmallWindow(const std::string& token,
                                                       const std::string& certificate = "") const {
    const std::string& target = server_->addresses()[1];
    grpc::ChannelArguments arguments = client::ServiceChannelArguments();
    arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
    return grpc::CreateCustomChannel(
        target, client::MakeChannelCredentials(target, ForTls(token, certificate)).value(),
        arguments);
  }

  // "warning refused 1 calls, ...": what has `text` in it.
  std::vector<std::string> Logged(const std::string& text) const {
    std::vector<std::string> lines;
    for (const std::string& line : log_->last_formatted()) {
      if (absl::StrContains(line, text)) lines.push_back(line);
    }
    return lines;
  }

  std::string folder_;
  const std::shared_ptr<spdlog::logger> before_ = spdlog::default_logger();
  const std::shared_ptr<spdlog::sinks::ringbuffer_sink_mt> log_ =
      std::make_shared<spdlog::sinks::ringbuffer_sink_mt>(1000);
  std::optional<TestAuthority> authority_;
  Engine engine_;
  DiagnosticsService diagnostics_;
  std::unique_ptr<Server> server_;

 private:
  client::Credentials ForTls(const std::string& token, const std::string& certificate) const {
    return {.tls_ca = authority_->certificate(),
            .tls_cert = certificate.empty() ? "" : File(certificate + ".pem"),
            .tls_key = certificate.empty() ? "" : File(certificate + ".key"),
            .token_file = token.empty() ? "" : File(token)};
  }
  std::shared_ptr<grpc::Channel> Connect(int address, const client::Credentials& given) const {
    return client::Connect(server_->addresses()[address], kPatience, given).value();
  }
  static inline int made_ = 0;
};

inline grpc::Status GetJobOver(const std::shared_ptr<grpc::Channel>& channel,
                               const std::string& token = "") {
  grpc::ClientContext context;
  if (!token.empty()) context.AddMetadata("authorization", "Bearer " + token);
  v1::GetJobRequest request;
  request.set_name("jobs/mine-1");
  v1::Job job;
  return v1::JobService::NewStub(channel)->GetJob(&context, request, &job);
}

// The end of what has been begun: waits for it.
inline absl::Status EndOf(client::BlockingCall& call) {
  grpc::ByteBuffer answer;
  while (call.Read(&answer)) continue;
  return call.Finish();
}

}  // namespace ballast::server

#endif  // BALLAST_TESTS_SERVER_ACCESS_ACCESS_SERVICE_H_
