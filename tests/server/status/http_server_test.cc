// The HTTP server against peers that no library would be: over TLS, on loopback.
#include "server/status/http_server.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <openssl/ssl.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "cpu_optimizer_service/common/system/file_descriptor.h"
#include "gtest/gtest.h"
#include "tests/support/certificates.h"

namespace ballast::server {
namespace {

using std::chrono::steady_clock;

class HttpServerTest : public testing::Test {
 protected:
  HttpServerTest() : folder_(testing::TempDir() + "http_server_test." + std::to_string(getpid())) {
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
    authority_ = std::make_unique<TestAuthority>(folder_, "ca");
    authority_->Issue("server", {.common_name = "localhost"});
  }
  ~HttpServerTest() override { std::filesystem::remove_all(folder_); }

  void SetUp() override {
    signal(SIGPIPE, SIG_IGN);  // OpenSSL writes to connections that the server has closed.
    HttpOptions options = {.listen = "127.0.0.1:0"};
    options.access.tls_certificate = folder_ + "/server.pem";
    options.access.tls_key = folder_ + "/server.key";
    auto server = HttpServer::Start(
        options, [this](const httplib::Request&) { return HttpAnswer{.body = body_}; });
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }

  FileDescriptor Connection() const {
    const std::string& address = server_->address();
    sockaddr_in name = {};
    name.sin_family = AF_INET;
    name.sin_port = htons(static_cast<uint16_t>(std::stoi(address.substr(address.rfind(':') + 1))));
    inet_pton(AF_INET, "127.0.0.1", &name.sin_addr);
    FileDescriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(connect(socket.number(), reinterpret_cast<sockaddr*>(&name), sizeof(name)), 0);
    return socket;
  }
  struct Peer {
    FileDescriptor socket;
    std::unique_ptr<SSL, decltype(&SSL_free)> session;
  };
  // After the handshake. A peer that is slow is given up: on a busy machine that may be an honest
  // one, which tries again.
  Peer Shaken(int receive_buffer_bytes = 0) {
    const auto limit = steady_clock::now() + kLimit;
    for (;;) {
      Peer peer = {.socket = Connection(), .session = {SSL_new(client_.get()), SSL_free}};
      if (receive_buffer_bytes > 0) {
        setsockopt(peer.socket.number(), SOL_SOCKET, SO_RCVBUF, &receive_buffer_bytes,
                   sizeof(receive_buffer_bytes));
      }
      SSL_set_fd(peer.session.get(), peer.socket.number());
      if (SSL_connect(peer.session.get()) == 1 || steady_clock::now() > limit) return peer;
    }
  }
  static bool SendRequest(SSL* session) {
    const std::string request = "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n";
    return SSL_write(session, request.data(), static_cast<int>(request.size())) ==
           static_cast<int>(request.size());
  }
  // What an honest peer is answered.
  std::string Ask() {
    const auto limit = steady_clock::now() + kLimit;
    for (;;) {
      const Peer peer = Shaken();
      std::string answer;
      char buffer[4096];
      for (int got = SendRequest(peer.session.get()) ? 1 : 0; got > 0;) {
        got = SSL_read(peer.session.get(), buffer, sizeof(buffer));
        if (got > 0) answer.append(buffer, got);
      }
      if (answer.ends_with("\r\n\r\n" + body_) || steady_clock::now() > limit) return answer;
    }
  }

  static constexpr std::chrono::minutes kLimit{2};

  const std::string folder_;
  std::string body_ = "answered\n";
  std::unique_ptr<TestAuthority> authority_;
  std::unique_ptr<HttpServer> server_;
  std::unique_ptr<SSL_CTX, decltype(&SSL_CTX_free)> client_{SSL_CTX_new(TLS_client_method()),
                                                            SSL_CTX_free};
};

// TLS 1.3 lets a peer change its keys at any time: such records are no data, and OpenSSL reads on
// within one call.
TEST_F(HttpServerTest, APeerThatOnlyChangesItsKeysIsLeft) {
  const Peer peer = Shaken();
  const auto limit = steady_clock::now() + std::chrono::seconds(60);
  bool left = false;
  while (!left && steady_clock::now() < limit) {
    left = SSL_key_update(peer.session.get(), SSL_KEY_UPDATE_NOT_REQUESTED) != 1 ||
           SSL_do_handshake(peer.session.get()) != 1;
  }
  EXPECT_TRUE(left);
  EXPECT_NE(Ask().find("\r\n\r\nanswered\n"), std::string::npos);
}

TEST_F(HttpServerTest, PeersThatDoNotReadHoldUpNoAnswer) {
  body_.assign(size_t{8} << 20, 'x');
  std::vector<Peer> peers;
  for (int i = 0; i < 30; ++i) {
    // So that the answer does not fit into what the system buffers.
    peers.push_back(Shaken(/*receive_buffer_bytes=*/4096));
    EXPECT_TRUE(SendRequest(peers.back().session.get()));
  }
  EXPECT_GT(Ask().size(), body_.size());
}

}  // namespace
}  // namespace ballast::server
