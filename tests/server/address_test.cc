#include "server/address.h"

#include <gtest/gtest.h>

#include <string>

namespace ballast::server {
namespace {

TEST(Address, IsTakenApart) {
  EXPECT_EQ(ParseAddress("127.0.0.1:70")->host, "127.0.0.1");
  EXPECT_EQ(ParseAddress("127.0.0.1:70")->port, 70);
  EXPECT_EQ(ParseAddress("[::1]:0")->host, "::1");
  EXPECT_EQ(ParseAddress("unix:/run/x")->unix_path, "/run/x");
  EXPECT_EQ(ParseAddress("unix:///run/x")->unix_path, "///run/x");
}

TEST(Address, OfAnotherFormIsInvalid) {
  for (const std::string text :
       {"", "localhost", ":70", "localhost:", "localhost:x", "localhost:70000", "localhost:-1",
        "::1:70", "unix:", "unix:relative", "ipv4:127.0.0.1:x"}) {
    EXPECT_EQ(ParseAddress(text).status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
  EXPECT_EQ(ParseAddress("unix:/" + std::string(200, 'x')).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(Address, IsLocalIfOnlyThisHostReachesIt) {
  for (const char* local : {"localhost:1", "127.0.0.1:1", "127.3.2.1:1", "[::1]:1", "unix:/x"}) {
    EXPECT_TRUE(IsLocal(ParseAddress(local).value())) << local;
  }
  for (const char* remote :
       {"0.0.0.0:1", "[::]:1", "10.0.0.1:1", "128.0.0.1:1", "example.com:1", "127.example.com:1"}) {
    EXPECT_FALSE(IsLocal(ParseAddress(remote).value())) << remote;
  }
}

}  // namespace
}  // namespace ballast::server
