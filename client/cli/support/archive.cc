#include "client/cli/support/archive.h"

#include <zlib.h>

#include <cstring>
#include <ctime>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cpu_optimizer_service/common/check.h"

namespace ballast::client::cli {
namespace {

constexpr size_t kBlockBytes = 512;

// POSIX.1-1988 ustar.
struct Header {
  char name[100];
  char mode[8];
  char uid[8];
  char gid[8];
  char size[12];
  char mtime[12];
  char checksum[8];
  char type;
  char linked[100];
  char magic[6];
  char version[2];
  char rest[247];
};
static_assert(sizeof(Header) == kBlockBytes);

}  // namespace

void Archive::Add(absl::string_view name, absl::string_view contents) {
  const std::string path = absl::StrCat(folder_, "/", name);
  Check(path.size() < sizeof(Header::name), "the name of a file in an archive is short");
  Header header = {};
  std::memcpy(header.name, path.data(), path.size());
  // Numbers are octal digits as text, with the zero byte that SNPrintF adds.
  absl::SNPrintF(header.mode, sizeof(header.mode), "%07o", 0644);
  absl::SNPrintF(header.uid, sizeof(header.uid), "%07o", 0);
  absl::SNPrintF(header.gid, sizeof(header.gid), "%07o", 0);
  absl::SNPrintF(header.size, sizeof(header.size), "%011o", contents.size());
  absl::SNPrintF(header.mtime, sizeof(header.mtime), "%011o", std::time(nullptr));
  // A regular file.
  header.type = '0';
  std::memcpy(header.magic, "ustar", sizeof(header.magic));
  std::memcpy(header.version, "00", sizeof(header.version));
  // The sum is made with spaces in its own place.
  std::memset(header.checksum, ' ', sizeof(header.checksum));
  unsigned sum = 0;
  for (size_t i = 0; i < sizeof(header); ++i) {
    sum += reinterpret_cast<const unsigned char*>(&header)[i];
  }
  // Six digits and a zero byte; the last byte stays the space.
  absl::SNPrintF(header.checksum, sizeof(header.checksum), "%06o", sum);
  tar_.append(reinterpret_cast<const char*>(&header), sizeof(header));
  tar_.append(contents.data(), contents.size());
  tar_.append((kBlockBytes - contents.size() % kBlockBytes) % kBlockBytes, '\0');
}

absl::StatusOr<std::string> Archive::Compressed() const {
  // Two blocks of zeros end an archive.
  const std::string tar = tar_ + std::string(2 * kBlockBytes, '\0');
  z_stream stream = {};
  constexpr int kGzip = 16;  // Added to the size of the window: gzip's header, not zlib's.
  if (deflateInit2(&stream, Z_BEST_COMPRESSION, Z_DEFLATED, MAX_WBITS + kGzip, 8,
                   Z_DEFAULT_STRATEGY) != Z_OK) {
    return absl::ResourceExhaustedError(
        "there is no memory to compress the archive with; free some and try again");
  }
  // With room for all of it one call of deflate does the whole work.
  std::string out(deflateBound(&stream, tar.size()), '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(tar.data()));
  stream.avail_in = static_cast<uInt>(tar.size());
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  const int result = deflate(&stream, Z_FINISH);
  out.resize(stream.total_out);
  deflateEnd(&stream);
  if (result != Z_STREAM_END) {
    return absl::InternalError(
        absl::StrCat("the archive could not be compressed (code ", result, "); please report it"));
  }
  return out;
}

}  // namespace ballast::client::cli
