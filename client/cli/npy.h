// Arrays of fp32 as .npy files (NumPy format 1.0): written whole or not at all, and read in pieces.
//
//   auto writer = NpyWriter::Create("w.npy", {768, 3072}).value();
//   writer->Append(bytes);  // In C order, as often as needed.
//   writer->Commit();       // Now w.npy exists.
#ifndef BALLAST_CLIENT_CLI_NPY_H_
#define BALLAST_CLIENT_CLI_NPY_H_

#include <cstdint>
#include <fstream>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/cli/output_file.h"

namespace ballast::client::cli {

// Magic, version, length and dictionary, padded to a multiple of 64 bytes.
std::string NpyHeader(absl::Span<const int64_t> shape);

// One at a time.
class NpyWriter {
 public:
  // Errors, here and below, are one line that names the file and the reason.
  static absl::StatusOr<std::unique_ptr<NpyWriter>> Create(std::string path,
                                                           absl::Span<const int64_t> shape);

  // Little-endian fp32.
  absl::Status Append(std::string_view bytes);
  // DATA_LOSS if the appended bytes are not as many as the shape needs.
  absl::Status Commit();

 private:
  NpyWriter(std::unique_ptr<AtomicFile> file, int64_t data_bytes)
      : file_(std::move(file)), data_bytes_(data_bytes) {}

  const std::unique_ptr<AtomicFile> file_;
  const int64_t data_bytes_;
  int64_t appended_bytes_ = 0;
};

// In C order, little-endian.
class NpyReader {
 public:
  // INVALID_ARGUMENT: it is not such an array. NOT_FOUND, PERMISSION_DENIED.
  static absl::StatusOr<NpyReader> Open(const std::string& path);
  const std::vector<int64_t>& shape() const { return shape_; }
  // The next bytes of the array, `most` of them; empty at its end. DATA_LOSS: the file is shorter.
  absl::StatusOr<std::string> Read(size_t most);

 private:
  explicit NpyReader(std::string path) : path_(std::move(path)), file_(path_, std::ios::binary) {}
  absl::Status ReadHeader();

  std::string path_;
  std::ifstream file_;
  std::vector<int64_t> shape_;
  int64_t left_bytes_ = 0;
};

}  // namespace ballast::client::cli

#endif  // BALLAST_CLIENT_CLI_NPY_H_
