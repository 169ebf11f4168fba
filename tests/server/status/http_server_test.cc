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
        options, [](const HttpRequest&) { return HttpAnswer{.body = "answered\n"}; });
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
  // After the handshake.
  std::unique_ptr<SSL, decltype(&SSL_free)> Session(const FileDescriptor& socket) {
    std::unique_ptr<SSL, decltype(&SSL_free)> session(SSL_new(client_.get()), SSL_free);
    SSL_set_fd(session.get(), socket.number());
    EXPECT_EQ(SSL_connect(session.get()), 1);
    return session;
  }
  // What an honest peer is answered.
  std::string Ask() {
    const FileDescriptor socket = Connection();
    const auto session = Session(socket);
    const std::string request = "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n";
    EXPECT_EQ(SSL_write(session.get(), request.data(), static_cast<int>(request.size())),
              static_cast<int>(request.size()));
    std::string answer;
    char buffer[4096];
    for (int got = 0; (got = SSL_read(session.get(), buffer, sizeof(buffer))) > 0;) {
      answer.append(buffer, got);
    }
    return answer;
  }

  const std::string folder_;
  std::unique_ptr<TestAuthority> authority_;
  std::unique_ptr<HttpServer> server_;
  std::unique_ptr<SSL_CTX, decltype(&SSL_CTX_free)> client_{SSL_CTX_new(TLS_client_method()),
                                                            SSL_CTX_free};
};

// TLS 1.3 lets a peer change its keys at any time: such records are no data, and OpenSSL reads on
// within one call.
TEST_F(HttpServerTest, APeerThatOnlyChangesItsKeysIsLeft) {
  const FileDescriptor socket = Connection();
  const auto session = Session(socket);
  const auto limit = steady_clock::now() + std::chrono::seconds(60);
  bool left = false;
  while (!left && steady_clock::now() < limit) {
    left = SSL_key_update(session.get(), SSL_KEY_UPDATE_NOT_REQUESTED) != 1 ||
           SSL_do_handshake(session.get()) != 1;
  }
  EXPECT_TRUE(left);
  EXPECT_NE(Ask().find("\r\n\r\nanswered\n"), std::string::npos);
}

TEST_F(HttpServerTest, ABurstOfSilentPeersIsSoonOver) {
  std::vector<FileDescriptor> silent;
  for (int i = 0; i < 60; ++i) silent.push_back(Connection());
  for (const FileDescriptor& each : silent) {  // All of them are left.
    char byte = 0;
    EXPECT_LE(recv(each.number(), &byte, 1, 0), 0);
  }
  EXPECT_NE(Ask().find("\r\n\r\nanswered\n"), std::string::npos);
}

}  // namespace
}  // namespace ballast::server
