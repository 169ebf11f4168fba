#include "client/c_api/self_signed.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/connect.h"
#include "client/home.h"
#include "cpu_optimizer_service/common/system/credential_files.h"
#include "cpu_optimizer_service/engine.h"
#include "server/server.h"
#include "tests/support/certificates.h"
#include "tests/support/messages.h"

namespace ballast::client {
namespace {

constexpr absl::Duration kTimeout = absl::Seconds(10);
constexpr absl::Duration kForNothing = absl::Seconds(2);

class SelfSigned : public testing::Test {
 protected:
  // Files of an identity. Their other side trusts `trusted`.
  Credentials MakeFiles(const std::string& name, const std::string& host) {
    const Identity made = MakeIdentity(host).value();
    const Credentials files{.tls_ca = Path(name, "trusted"),
                            .tls_cert = Path(name, "certificate"),
                            .tls_key = Path(name, "key")};
    WritePrivateFile(files.tls_cert, made.certificate);
    WritePrivateFile(files.tls_key, made.key);
    return files;
  }
  static void Trust(const Credentials& files, const std::vector<Credentials>& others) {
    std::string all;
    for (const Credentials& other : others) {
      all += ReadCredentialFile(other.tls_cert, Others::kMayRead).value();
    }
    WritePrivateFile(files.tls_ca, all);
  }
  // Its address.
  std::string Serve(const Credentials& files, const std::string& host) {
    servers_.push_back(server::Server::Start(engine_, {.listen = {absl::StrCat(host, ":0")},
                                                       .access = {.tls_certificate = files.tls_cert,
                                                                  .tls_key = files.tls_key,
                                                                  .tls_client_ca = files.tls_ca}})
                           .value());
    return servers_.back()->addresses()[0];
  }

 private:
  std::string Path(const std::string& name, const std::string& file) const {
    return folder_ + name + "." + file;
  }
  const std::string folder_ = testing::TempDir() + "self-signed-";
  Engine engine_{{.memory_limit_bytes = int64_t{1} << 20, .threads = 1}};
  std::vector<std::unique_ptr<server::Server>> servers_;
};

TEST_F(SelfSigned, TwoThatTrustEachOtherConnect) {
  for (const auto& [host, listen] : {std::pair("127.0.0.1", "127.0.0.1"), {"::1", "[::1]"}}) {
    const Credentials service = MakeFiles("service", host);
    const Credentials caller = MakeFiles("caller", "10.77.0.1");
    Trust(service, {caller});
    // Whichever stands first.
    Trust(caller, {caller, service});
    // A call checks the address, too.
    const auto channel = Connect(Serve(service, listen), kTimeout, caller);
    ASSERT_TRUE(channel.ok()) << channel.status();
    EXPECT_TRUE(IdentifyService(*channel).ok());
  }
}

TEST_F(SelfSigned, AnotherOfTheSameAddressIsNotTrusted) {
  const Credentials service = MakeFiles("named", "127.0.0.1");
  const Credentials caller = MakeFiles("trusting", "127.0.0.1");
  const Credentials stranger = MakeFiles("stranger", "127.0.0.1");
  Trust(service, {service, caller});
  Trust(caller, {stranger});
  const std::string address = Serve(service, "127.0.0.1");
  // The caller knows the stranger only, and the service does not know it.
  EXPECT_EQ(Connect(address, kForNothing, caller).status().code(), absl::StatusCode::kUnavailable);
  Trust(stranger, {service});
  EXPECT_EQ(Connect(address, kForNothing, stranger).status().code(),
            absl::StatusCode::kUnavailable);
  Trust(caller, {service});
  EXPECT_TRUE(Connect(address, kTimeout, caller).ok());
}

TEST_F(SelfSigned, ItIsOfAnAddress) {
  for (const char* host : {"", "gpu1", "10.0.0.1:7070", "[::1]", "::1,DNS:gpu1"}) {
    EXPECT_TRUE(Refused(MakeIdentity(host), absl::StatusCode::kInvalidArgument));
  }
}

}  // namespace
}  // namespace ballast::client
