#include "server/holder/log_line.h"

#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace ballast::server {
namespace {

constexpr int kLongestLine = 2048;

LogFormat the_format = LogFormat::kText;

const char* NameOf(LogPriority priority) {
  switch (priority) {
    case kErrorPriority:
      return "error";
    case kWarningPriority:
      return "warning";
    case kInfoPriority:
      return "info";
    case kDebugPriority:
      return "debug";
  }
  return "info";
}

// Appends to a buffer, and stops at its end.
class Text {
 public:
  void Add(char byte) {
    if (size_ < sizeof(bytes_)) bytes_[size_++] = byte;
  }
  void Add(const char* text) {
    for (; *text != '\0'; ++text) Add(*text);
  }
  // Within a string of JSON. Bytes that are no ASCII may be parts of anything.
  void AddEscaped(const char* text) {
    for (; *text != '\0'; ++text) {
      const auto byte = static_cast<unsigned char>(*text);
      if (byte == '"' || byte == '\\') Add('\\');
      Add(byte < 0x20 || byte > 0x7e ? '?' : *text);
    }
  }
  void Write() {
    // A log without a reader, or on a full disk, is no reason to end.
    if (write(STDERR_FILENO, bytes_, size_) < 0) return;
  }

 private:
  char bytes_[2 * kLongestLine + 256] = {};  // Room for text of which each byte is escaped.
  size_t size_ = 0;
};

}  // namespace

void SetLogFormat(LogFormat format) { the_format = format; }
LogFormat TheLogFormat() { return the_format; }

bool LogIsJournal() {
  const char* const stream = std::getenv("JOURNAL_STREAM");
  unsigned long long device = 0;
  unsigned long long inode = 0;
  struct stat there = {};
  return stream != nullptr && std::sscanf(stream, "%llu:%llu", &device, &inode) == 2 &&
         fstat(STDERR_FILENO, &there) == 0 && there.st_dev == device && there.st_ino == inode;
}

void LogLine(LogPriority priority, const char* format, ...) {
  char message[kLongestLine] = {};
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(message, sizeof(message), format, arguments);
  va_end(arguments);
  Text line;
  if (LogIsJournal()) {
    line.Add('<');
    line.Add(static_cast<char>('0' + priority));
    line.Add('>');
  }
  if (the_format == LogFormat::kText) {
    line.Add("ballastd: ");
    line.Add(message);
  } else {
    timespec now = {};
    clock_gettime(CLOCK_REALTIME, &now);
    tm utc = {};
    gmtime_r(&now.tv_sec, &utc);
    char time[64] = {};
    const size_t seconds = strftime(time, sizeof(time), "%Y-%m-%dT%H:%M:%S", &utc);
    std::snprintf(time + seconds, sizeof(time) - seconds, ".%03ldZ", now.tv_nsec / 1000000);
    line.Add(R"({"time":")");
    line.Add(time);
    line.Add(R"(","level":")");
    line.Add(NameOf(priority));
    line.Add(R"(","message":")");
    line.AddEscaped(message);
    line.Add("\"}");
  }
  line.Add('\n');
  line.Write();
}

}  // namespace ballast::server
