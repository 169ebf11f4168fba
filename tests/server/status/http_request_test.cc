#include "server/status/http_request.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace ballast::server {
namespace {

using ::testing::Pair;
using ::testing::UnorderedElementsAre;

TEST(HttpRequest, HasAMethodAPathAQueryAndTwoHeaders) {
  const std::string text =
      "GET /api/job%3f?job=a%20b+c&match=&job=other HTTP/1.1\r\nHOST: here:7071\r\n"
      "Accept: */*\r\nauthorization:  Bearer abc \r\n\r\nmore";
  const size_t head = HeadBytes(text);
  EXPECT_EQ(text.substr(head), "more");
  const auto request = ParseHead(text.substr(0, head));
  ASSERT_TRUE(request.ok()) << request.status();
  EXPECT_EQ(request->method, "GET");
  EXPECT_EQ(request->path, "/api/job?");
  EXPECT_THAT(request->query, UnorderedElementsAre(Pair("job", "a b c"), Pair("match", "")));
  EXPECT_EQ(request->Get("job"), "a b c");
  EXPECT_EQ(request->Get("none"), "");
  EXPECT_EQ(request->host, "here:7071");
  EXPECT_EQ(request->authorization, "Bearer abc");
  EXPECT_EQ(request->certificate_name, std::nullopt);
}

TEST(HttpRequest, MayNameTheWholeUrlAndNoHost) {
  EXPECT_EQ(ParseHead("HEAD http://here:7071/a?b HTTP/1.0\r\n\r\n")->path, "/a");
  EXPECT_EQ(ParseHead("GET / HTTP/1.0\r\n\r\n")->host, std::nullopt);
  EXPECT_FALSE(ParseHead("GET / HTTP/1.1\r\n\r\n").ok());  // RFC 9112, 3.2.
  EXPECT_EQ(ParseHead("GET / HTTP/1.1\r\nHost:\r\n\r\n")->host, "");
}

TEST(HttpRequest, HasNotComeBeforeItsEmptyLine) {
  const std::string text = "GET / HTTP/1.1\r\nHost: a\r\n\r\n";
  for (size_t bytes = 0; bytes < text.size(); ++bytes) {
    EXPECT_EQ(HeadBytes(text.substr(0, bytes)), 0u) << bytes;
  }
  EXPECT_EQ(HeadBytes(text), text.size());
}

TEST(HttpRequest, IsRefusedInAnyOtherForm) {
  for (const char* head : {"",
                           "\r\n\r\n",
                           "GET /\r\n\r\n",
                           "GET / HTTP/2\r\n\r\n",
                           "GET  / HTTP/1.1\r\n\r\n",
                           "GET / HTTP/1.1 \r\n\r\n",
                           "G(T / HTTP/1.1\r\n\r\n",
                           "GET a HTTP/1.1\r\n\r\n",
                           "GET * HTTP/1.1\r\n\r\n",
                           "GET http://here HTTP/1.1\r\n\r\n",
                           "GET /% HTTP/1.1\r\n\r\n",
                           "GET /%4 HTTP/1.1\r\n\r\n",
                           "GET /%g0 HTTP/1.1\r\n\r\n",
                           "GET /?a=%2 HTTP/1.1\r\n\r\n",
                           "GET / HTTP/1.1\r\nHost\r\n\r\n",
                           "GET / HTTP/1.1\r\n: a\r\n\r\n",
                           "GET / HTTP/1.1\r\nHost : a\r\n\r\n",
                           "GET / HTTP/1.1\r\nA: b\r\n c\r\n\r\n",
                           "GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
                           "GET / HTTP/1.1\r\nA: b\rc\r\n\r\n",
                           "GET / HTTP/1.1\r\nAuthorization: a\r\nAuthorization: b\r\n\r\n",
                           "GET / HTTP/1.1\nHost: a\n\n"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(ParseHead(head).status())) << head;
  }
}

}  // namespace
}  // namespace ballast::server
