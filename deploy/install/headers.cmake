# cmake --install: the headers that trainers include, as ballast/ballast.h (from C), ballast/client/X.h and
# ballast/common/X.h. In the tree they are named from its root, and so they include each other. Where they are
# installed a name begins with ballast/, so that no project's own client/ is taken for ours.
#
# `source`, `scratch`, `includes`: folders; `client`, `common`: names of headers.
function(install_header from to)
  file(READ ${source}/${from} text)
  string(REPLACE "#include \"client/" "#include \"ballast/client/" text "${text}")
  string(REPLACE "#include \"cpu_optimizer_service/common/" "#include \"ballast/common/" text "${text}")
  file(WRITE ${scratch}/${to} "${text}")
  cmake_path(GET to PARENT_PATH folder)
  file(INSTALL DESTINATION "${includes}/${folder}" TYPE FILE FILES ${scratch}/${to})
endfunction()

foreach(header IN LISTS client)
  if(header STREQUAL ballast)
    install_header(client/ballast.h ballast/ballast.h)
  else()
    install_header(client/${header}.h ballast/client/${header}.h)
  endif()
endforeach()
foreach(header IN LISTS common)
  install_header(cpu_optimizer_service/common/${header}.h ballast/common/${header}.h)
endforeach()
