#include "cpu_optimizer_service/common/system/credential_files.h"

#include <gmock/gmock.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>

#include "tests/support/certificates.h"

namespace ballast {
namespace {

using ::testing::HasSubstr;

class CredentialFilesTest : public testing::Test {
 protected:
  CredentialFilesTest() : folder_(testing::TempDir() + "credentials." + std::to_string(getpid())) {
    std::filesystem::create_directories(folder_);
    authority_ = std::make_unique<TestAuthority>(folder_, "ca");
    authority_->Issue("good", {.common_name = "good"});
    authority_->Issue("other", {.common_name = "other"});
    authority_->Issue("old", {.common_name = "old", .begin_seconds = -100, .end_seconds = -10});
    authority_->Issue("young", {.common_name = "young", .begin_seconds = 1000});
  }
  ~CredentialFilesTest() override { std::filesystem::remove_all(folder_); }

  std::string File(const std::string& name) const { return folder_ + "/" + name; }
  std::string PairError(const std::string& certificate, const std::string& key) const {
    return std::string(ReadKeyPair(File(certificate), File(key)).status().message());
  }

  const std::string folder_;
  std::unique_ptr<TestAuthority> authority_;
};

TEST_F(CredentialFilesTest, TakesACertificateAndItsKey) {
  EXPECT_EQ(ReadKeyPair(File("good.pem"), File("good.key")).status(), absl::OkStatus());
  EXPECT_EQ(ReadCertificateAuthority(File("ca.pem")).status(), absl::OkStatus());
}

TEST_F(CredentialFilesTest, SaysInOneLineWhatIsWrong) {
  EXPECT_THAT(PairError("good.pem", "other.key"), HasSubstr("is not the key of the certificate"));
  EXPECT_THAT(PairError("old.pem", "old.key"), HasSubstr("renew it"));
  EXPECT_THAT(PairError("young.pem", "young.key"), HasSubstr("see to this host's clock"));
  EXPECT_THAT(PairError("gone.pem", "good.key"), HasSubstr("No such file"));
  EXPECT_THAT(PairError("good.pem", "gone.key"), HasSubstr("No such file"));
  EXPECT_THAT(PairError("good.key", "good.key"), HasSubstr("has no certificate"));
  EXPECT_THAT(PairError("good.pem", "good.pem"), HasSubstr("has no private key"));
  EXPECT_THAT(PairError(".", "good.key"), HasSubstr("is no file"));
  EXPECT_THAT(std::string(ReadCertificateAuthority(File("old.pem")).status().message()),
              HasSubstr("renew it"));
  ASSERT_EQ(chmod(File("good.key").c_str(), 0644), 0);
  EXPECT_THAT(PairError("good.pem", "good.key"), HasSubstr("can be read by other users"));
  ASSERT_EQ(chmod(File("good.key").c_str(), 0640), 0);
  EXPECT_EQ(PairError("good.pem", "good.key"), "");
  ASSERT_EQ(chmod(File("good.pem").c_str(), 0666), 0);
  EXPECT_THAT(PairError("good.pem", "good.key"), HasSubstr("can be written by other users"));
}

TEST_F(CredentialFilesTest, RefusesTimesThatCannotBeRead) {
  constexpr char kWithoutSeconds[] = "7001010000Z";  // Which RFC 5280 forbids.
  authority_->Issue("begin", {.common_name = "begin", .begin = kWithoutSeconds});
  authority_->Issue("end", {.common_name = "end", .end = kWithoutSeconds});
  for (const std::string name : {"begin", "end"}) {
    EXPECT_THAT(PairError(name + ".pem", name + ".key"),
                HasSubstr("a time of validity that cannot be read"));
    EXPECT_THAT(std::string(ReadCertificateAuthority(File(name + ".pem")).status().message()),
                HasSubstr("a time of validity that cannot be read"));
  }
}

TEST_F(CredentialFilesTest, ASecretBelongsToThisUserOrToRoot) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can give a file to another user";
  WritePrivateFile(File("token"), "a");
  for (const char* secret : {"token", "good.key"}) {
    ASSERT_EQ(chown(File(secret).c_str(), 4242, 0), 0);
  }
  ASSERT_EQ(chown(File("good.pem").c_str(), 4242, 0), 0);  // Is public.
  EXPECT_THAT(std::string(ReadTokenFile(File("token")).status().message()),
              HasSubstr("belongs to user 4242, and must belong to this user or to root: chown 0"));
  EXPECT_THAT(PairError("good.pem", "good.key"), HasSubstr("good.key belongs to user 4242"));
  ASSERT_EQ(seteuid(4242), 0);
  EXPECT_EQ(ReadTokenFile(File("token")).status(), absl::OkStatus());
  ASSERT_EQ(seteuid(0), 0);
  // As Kubernetes has them: root's, and readable by the group.
  ASSERT_EQ(chown(File("token").c_str(), 0, 4242), 0);
  ASSERT_EQ(chmod(File("token").c_str(), 0440), 0);
  ASSERT_EQ(setegid(4242), 0);
  ASSERT_EQ(seteuid(4242), 0);
  EXPECT_EQ(ReadTokenFile(File("token")).status(), absl::OkStatus());
  ASSERT_EQ(seteuid(0), 0);
  ASSERT_EQ(setegid(0), 0);
}

TEST_F(CredentialFilesTest, ATokenIsOneWordOfAPrivateFile) {
  const auto read = [&](const std::string& contents) {
    WritePrivateFile(File("token"), contents);
    return ReadTokenFile(File("token"));
  };
  EXPECT_EQ(read(" a-Token_1=\n").value(), "a-Token_1=");
  EXPECT_THAT(std::string(read(" \n").status().message()), HasSubstr("is empty"));
  EXPECT_THAT(std::string(read("two words").status().message()), HasSubstr("more than one"));
  EXPECT_THAT(std::string(read("a\nb").status().message()), HasSubstr("more than one"));
  EXPECT_THAT(std::string(read(std::string(2 << 20, 'a')).status().message()),
              HasSubstr("larger than"));
  ASSERT_TRUE(read("a").ok());
  ASSERT_EQ(chmod(File("token").c_str(), 0604), 0);
  EXPECT_THAT(std::string(ReadTokenFile(File("token")).status().message()),
              HasSubstr("can be read by other users"));
}

}  // namespace
}  // namespace ballast
