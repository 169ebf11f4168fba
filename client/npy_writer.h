// Writes an array of fp32 as a .npy file (NumPy format 1.0), whole or not at all.
//
//   auto writer = NpyWriter::Create("w.npy", {768, 3072}).value();
//   writer->Append(bytes);  // in C order, as often as needed
//   writer->Commit();       // now w.npy is there
//
// The data go to a file beside it, which Commit renames and the destructor removes.
#ifndef BALLAST_CLIENT_NPY_WRITER_H_
#define BALLAST_CLIENT_NPY_WRITER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace ballast::client::cli {

// Magic, version, length and dictionary, padded to a multiple of 64 bytes.
std::string NpyHeader(absl::Span<const int64_t> shape);

// Removes the file that a writer has not finished, if there is one: for a handler of a signal that
// ends the process.
void RemoveUnfinishedNpy();

// One at a time.
class NpyWriter {
 public:
  // One line that names the file and what is wrong with it, here and below.
  static absl::StatusOr<std::unique_ptr<NpyWriter>> Create(std::string path,
                                                           absl::Span<const int64_t> shape);
  ~NpyWriter();
  NpyWriter(const NpyWriter&) = delete;
  NpyWriter& operator=(const NpyWriter&) = delete;

  // Little-endian fp32.
  absl::Status Append(std::string_view bytes);
  // DATA_LOSS if what was appended is not what the shape needs.
  absl::Status Commit();

 private:
  NpyWriter(std::string path, std::string temporary_path, int file, int64_t data_bytes)
      : path_(std::move(path)),
        temporary_path_(std::move(temporary_path)),
        file_(file),
        data_bytes_(data_bytes) {}
  absl::Status Write(std::string_view bytes);
  absl::Status Error(const char* what, int error) const;

  const std::string path_;
  const std::string temporary_path_;
  int file_;
  const int64_t data_bytes_;
  int64_t appended_bytes_ = 0;
};

}  // namespace ballast::client::cli

#endif  // BALLAST_CLIENT_NPY_WRITER_H_
