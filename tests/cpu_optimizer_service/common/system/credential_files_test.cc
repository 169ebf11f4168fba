#include "cpu_optimizer_service/common/system/credential_files.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>

#include "tests/support/certificates.h"
#include "tests/support/messages.h"

namespace ballast {
namespace {

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
  absl::Status ReadPair(const std::string& certificate, const std::string& key) const {
    return ReadKeyPair(File(certificate), File(key)).status();
  }

  const std::string folder_;
  std::unique_ptr<TestAuthority> authority_;
};

TEST_F(CredentialFilesTest, TakesACertificateAndItsKey) {
  EXPECT_EQ(ReadPair("good.pem", "good.key"), absl::OkStatus());
  EXPECT_EQ(ReadCertificateAuthority(File("ca.pem")).status(), absl::OkStatus());
}

TEST_F(CredentialFilesTest, SaysInOneLineWhatIsWrong) {
  EXPECT_TRUE(Refused(ReadPair("good.pem", "other.key"), absl::StatusCode::kInvalidArgument));
  EXPECT_TRUE(Refused(ReadPair("old.pem", "old.key"), absl::StatusCode::kInvalidArgument));
  EXPECT_TRUE(Refused(ReadPair("young.pem", "young.key"), absl::StatusCode::kInvalidArgument));
  EXPECT_TRUE(Refused(ReadPair("gone.pem", "good.key"), absl::StatusCode::kInvalidArgument));
  EXPECT_TRUE(Refused(ReadPair("good.pem", "gone.key"), absl::StatusCode::kInvalidArgument));
  EXPECT_TRUE(Refused(ReadPair("good.key", "good.key"), absl::StatusCode::kInvalidArgument));
  EXPECT_TRUE(Refused(ReadPair("good.pem", "good.pem"), absl::StatusCode::kInvalidArgument));
  EXPECT_TRUE(Refused(ReadPair(".", "good.key"), absl::StatusCode::kInvalidArgument));
  EXPECT_TRUE(
      Refused(ReadCertificateAuthority(File("old.pem")), absl::StatusCode::kInvalidArgument));
  ASSERT_EQ(chmod(File("good.key").c_str(), 0644), 0);
  EXPECT_TRUE(Refused(ReadPair("good.pem", "good.key"), absl::StatusCode::kInvalidArgument));
  ASSERT_EQ(chmod(File("good.key").c_str(), 0640), 0);
  EXPECT_EQ(ReadPair("good.pem", "good.key"), absl::OkStatus());
  ASSERT_EQ(chmod(File("good.pem").c_str(), 0666), 0);
  EXPECT_TRUE(Refused(ReadPair("good.pem", "good.key"), absl::StatusCode::kInvalidArgument));
}

TEST_F(CredentialFilesTest, RefusesTimesThatCannotBeRead) {
  constexpr char kWithoutSeconds[] = "7001010000Z";  // Which RFC 5280 forbids.
  authority_->Issue("begin", {.common_name = "begin", .begin = kWithoutSeconds});
  authority_->Issue("end", {.common_name = "end", .end = kWithoutSeconds});
  for (const std::string name : {"begin", "end"}) {
    EXPECT_TRUE(
        Refused(ReadPair(name + ".pem", name + ".key"), absl::StatusCode::kInvalidArgument));
    EXPECT_TRUE(
        Refused(ReadCertificateAuthority(File(name + ".pem")), absl::StatusCode::kInvalidArgument));
  }
}

TEST_F(CredentialFilesTest, ASecretBelongsToThisUserOrToRoot) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can give a file to another user";
  WritePrivateFile(File("token"), "a");
  for (const char* secret : {"token", "good.key"}) {
    ASSERT_EQ(chown(File(secret).c_str(), 4242, 0), 0);
  }
  ASSERT_EQ(chown(File("good.pem").c_str(), 4242, 0), 0);  // Is public.
  EXPECT_TRUE(Refused(ReadTokenFile(File("token")), absl::StatusCode::kInvalidArgument));
  EXPECT_TRUE(Refused(ReadPair("good.pem", "good.key"), absl::StatusCode::kInvalidArgument));
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
  EXPECT_TRUE(Refused(read(" \n"), absl::StatusCode::kInvalidArgument));
  EXPECT_TRUE(Refused(read("two words"), absl::StatusCode::kInvalidArgument));
  EXPECT_TRUE(Refused(read("a\nb"), absl::StatusCode::kInvalidArgument));
  EXPECT_TRUE(Refused(read(std::string(2 << 20, 'a')), absl::StatusCode::kInvalidArgument));
  ASSERT_TRUE(read("a").ok());
  ASSERT_EQ(chmod(File("token").c_str(), 0604), 0);
  EXPECT_TRUE(Refused(ReadTokenFile(File("token")), absl::StatusCode::kInvalidArgument));
}

}  // namespace
}  // namespace ballast
