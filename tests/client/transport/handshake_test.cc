// Services that refuse a client's certificate in every way, and some that close for other reasons.
#include "client/transport/handshake.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <netinet/in.h>
#include <openssl/ssl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>

#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/system/file_descriptor.h"
#include "tests/support/certificates.h"
#include "tests/support/messages.h"

namespace ballast::client {
namespace {

// What gRPC says when a service at `address` has closed a connection.
grpc::Status Closed(const std::string& address) {
  return {grpc::StatusCode::UNAVAILABLE,
          absl::StrCat("failed to connect to all addresses; last error: UNAVAILABLE: ipv4:",
                       address, ": Socket closed")};
}

struct Manner {
  int version = TLS1_3_VERSION;
  bool shakes_hands = true;
  bool asks = true;      // For a certificate of the client.
  bool names = true;     // The authority whose certificates it takes.
  bool verifies = true;  // With an alert where that fails. Otherwise it takes all.
  bool resets = false;   // In place of closing.
  int refuses = 9;       // So many connections are just closed; further ones are told something.
};

class Service {
 public:
  Service(const std::string& folder, const Manner& manner)
      : context_(SSL_CTX_new(TLS_server_method()), SSL_CTX_free) {
    SSL_CTX* const tls = context_.get();
    SSL_CTX_set_min_proto_version(tls, manner.version);
    SSL_CTX_set_max_proto_version(tls, manner.version);
    EXPECT_EQ(SSL_CTX_use_certificate_chain_file(tls, (folder + "/server.pem").c_str()), 1);
    EXPECT_EQ(SSL_CTX_use_PrivateKey_file(tls, (folder + "/server.key").c_str(), SSL_FILETYPE_PEM),
              1);
    const std::string authority = folder + "/ca.pem";
    EXPECT_EQ(SSL_CTX_load_verify_file(tls, authority.c_str()), 1);
    if (manner.names) SSL_CTX_set_client_CA_list(tls, SSL_load_client_CA_file(authority.c_str()));
    if (manner.asks) {
      SSL_CTX_set_verify(
          tls, SSL_VERIFY_PEER | (manner.verifies ? SSL_VERIFY_FAIL_IF_NO_PEER_CERT : 0),
          manner.verifies ? nullptr : [](int, X509_STORE_CTX*) { return 1; });
    }
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t bytes = sizeof(address);
    auto* const name = reinterpret_cast<sockaddr*>(&address);
    EXPECT_EQ(bind(listener_.number(), name, bytes), 0);
    EXPECT_EQ(listen(listener_.number(), 1), 0);
    EXPECT_EQ(getsockname(listener_.number(), name, &bytes), 0);
    target_ = absl::StrCat("127.0.0.1:", ntohs(address.sin_port));
    thread_ = std::thread([this, manner] { Serve(manner); });
  }
  ~Service() {
    shutdown(listener_.number(), SHUT_RDWR);
    thread_.join();
  }

  const std::string& target() const { return target_; }

 private:
  void Serve(const Manner& manner) {
    sigset_t pipe;  // Of this thread: the client's has to see to itself.
    sigemptyset(&pipe);
    sigaddset(&pipe, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &pipe, nullptr);
    for (int connection = 1;; ++connection) {
      const FileDescriptor socket(accept(listener_.number(), nullptr, nullptr));
      if (!socket) return;
      if (!manner.shakes_hands) continue;
      const std::unique_ptr<SSL, decltype(&SSL_free)> session(SSL_new(context_.get()), SSL_free);
      SSL_set_fd(session.get(), socket.number());
      if (SSL_accept(session.get()) == 1 && connection > manner.refuses) {
        SSL_write(session.get(), "x", 1);
      }
      if (manner.resets) {
        const linger none = {.l_onoff = 1, .l_linger = 0};
        setsockopt(socket.number(), SOL_SOCKET, SO_LINGER, &none, sizeof(none));
        continue;
      }
      shutdown(socket.number(), SHUT_WR);
      char rest = 0;  // Until the client is done, so that no reset takes an alert away.
      while (read(socket.number(), &rest, 1) > 0) continue;
    }
  }

  std::unique_ptr<SSL_CTX, decltype(&SSL_CTX_free)> context_;
  const FileDescriptor listener_{socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
  std::string target_;
  std::thread thread_;
};

class HandshakeTest : public testing::Test {
 protected:
  HandshakeTest()
      : folder_(absl::StrCat(testing::TempDir(), "handshake_test.", getpid())),
        other_folder_(folder_ + "/other") {
    std::filesystem::create_directories(other_folder_);
    authority_ = std::make_unique<TestAuthority>(folder_, "ca");
    authority_->Issue("server", {.common_name = "server"});
    authority_->Issue("alice", {.common_name = "alice"});
    authority_->Issue("expired", {.common_name = "alice", .end_seconds = -30});
    TestAuthority(folder_, "other-ca").Issue("mallory", {.common_name = "mallory"});
    // Of the same name, with another key.
    TestAuthority(other_folder_, "ca").Issue("remade", {.common_name = "alice"});
    std::filesystem::rename(other_folder_ + "/remade.pem", File("remade.pem"));
    std::filesystem::rename(other_folder_ + "/remade.key", File("remade.key"));
  }
  ~HandshakeTest() override { std::filesystem::remove_all(folder_); }

  std::string File(const std::string& name) const { return folder_ + "/" + name; }
  Credentials Of(const std::string& name) const {
    if (name.empty()) return {.tls_ca = authority_->certificate()};
    return {.tls_ca = authority_->certificate(),
            .tls_cert = File(name + ".pem"),
            .tls_key = File(name + ".key")};
  }
  std::string Why(const std::string& name, const Manner& manner) const {
    const Service service(folder_, manner);
    return WhyHandshakeFailed(Closed(service.target()), service.target(), Of(name));
  }

  const std::string folder_;
  const std::string other_folder_;
  std::unique_ptr<TestAuthority> authority_;
};

TEST_F(HandshakeTest, AServiceThatSaysWhyIsBelieved) {
  for (const int version : {TLS1_2_VERSION, TLS1_3_VERSION}) {
    for (const char* name : {"mallory", "remade", "expired"}) {
      EXPECT_TRUE(Says(Why(name, {.version = version})));
    }
  }
  EXPECT_TRUE(Says(Why("", {})));
}

TEST_F(HandshakeTest, OneThatJustClosesHasAskedForACertificateOfAnotherAuthority) {
  EXPECT_TRUE(Says(Why("mallory", {.verifies = false})));
  EXPECT_TRUE(Says(Why("", {.verifies = false})));
}

TEST_F(HandshakeTest, WhatMayPassIsNotTold) {
  for (const char* name : {"alice", "mallory", ""}) {
    EXPECT_EQ(Why(name, {.verifies = false, .refuses = 0}), "") << name;
    EXPECT_EQ(Why(name, {.verifies = false, .refuses = 1}), "") << name;
    EXPECT_EQ(Why(name, {.asks = false}), "") << name;
    EXPECT_EQ(Why(name, {.shakes_hands = false}), "") << name;
  }
  EXPECT_EQ(Why("alice", {}), "");
  EXPECT_EQ(Why("remade", {.verifies = false}), "");  // Nobody says that it is that.
  EXPECT_EQ(Why("mallory", {.names = false, .verifies = false}), "");  // It may take all.
  EXPECT_EQ(Why("gone", {.verifies = false}), "");  // Perhaps it is being renewed.
}

// Which raises no SIGPIPE: that would end this process.
TEST_F(HandshakeTest, AResetIsAnEndAsAnyOther) {
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(Why("alice", {.verifies = false, .resets = true}), "");
  }
}

TEST_F(HandshakeTest, WithATokenNoCertificateIsMissing) {
  const Service service(folder_, {.verifies = false});
  Credentials credentials = Of("");
  credentials.token_file = File("token");
  EXPECT_EQ(WhyHandshakeFailed(Closed(service.target()), service.target(), credentials), "");
}

TEST_F(HandshakeTest, OnlyAClosedConnectionIsTriedAgain) {
  const Service service(folder_, {});
  const auto why = [&](const grpc::Status& status, const std::string& target) {
    return WhyHandshakeFailed(status, target, Of("mallory"));
  };
  EXPECT_EQ(why(grpc::Status::OK, service.target()), "");
  EXPECT_EQ(why({grpc::StatusCode::UNAVAILABLE, "Connection refused"}, service.target()), "");
  EXPECT_EQ(
      why({grpc::StatusCode::UNAVAILABLE, "Socket closed", "details of ours"}, service.target()),
      "");
  const grpc::Status closed = Closed(service.target());
  EXPECT_EQ(why(closed, "unix:" + File("socket")), "");
  EXPECT_EQ(WhyHandshakeFailed(closed, service.target(), {}), "");
  EXPECT_TRUE(Says(why(closed, service.target())));
}

TEST_F(HandshakeTest, NoNameIsResolvedAgain) {
  const Service service(folder_, {});
  EXPECT_TRUE(
      Says(WhyHandshakeFailed(Closed(service.target()), "no.such.host.invalid:1", Of("mallory"))));
  EXPECT_EQ(WhyHandshakeFailed({grpc::StatusCode::UNAVAILABLE, "Socket closed"}, service.target(),
                               Of("mallory")),
            "");
}

}  // namespace
}  // namespace ballast::client
