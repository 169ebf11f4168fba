// Certificates for tests, made where they are needed.
//
//   const TestAuthority authority(folder, "ca");           // folder/ca.pem
//   authority.Issue("alice", {.common_name = "alice"});    // folder/alice.pem, folder/alice.key
#ifndef BALLAST_TESTS_SUPPORT_CERTIFICATES_H_
#define BALLAST_TESTS_SUPPORT_CERTIFICATES_H_

#include <memory>
#include <string>

namespace ballast {

// Writes a file that only this user may read.
void WritePrivateFile(const std::string& path, const std::string& contents);

class TestAuthority {
 public:
  struct Request {
    std::string common_name;
    // From now on: when it begins and ends to be valid.
    long begin_seconds = -60;  // NOLINT: OpenSSL's type.
    long end_seconds = 3600;   // NOLINT
    // What the certificate has in their place; empty: nothing.
    std::string begin = {};
    std::string end = {};
  };

  TestAuthority(std::string folder, const std::string& name);
  ~TestAuthority();

  std::string certificate() const;  // Its path.
  // Writes FOLDER/NAME.pem, of localhost and 127.0.0.1, and FOLDER/NAME.key.
  void Issue(const std::string& name, const Request& request) const;

 private:
  struct Made;
  const std::string folder_;
  const std::string name_;
  std::unique_ptr<Made> made_;
};

}  // namespace ballast

#endif  // BALLAST_TESTS_SUPPORT_CERTIFICATES_H_
